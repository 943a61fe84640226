"""A base model and reward models over it that are small enough to start vLLM with."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from families import BOS, EOS, VOCAB, make_number_tokenizer, make_reward
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from radq.decoding.generate import generate
from radq.guides.base import Guide
from radq.guides.spec import GuideSpec, load_guides
from radq.models.kinds import RadQ
from radq.models.loading import load_causal_lm
from radq.sources.hub import quiet

TOKENIZER = make_number_tokenizer()
TOKENIZER.chat_template = "{{ messages[0].content }}"
PROMPTS = ["5 9 3 12 30", "11", "6 6 31 14 3 8 20 21", "8 9 10 11 12 13 14 15 16 17 18 19 20 21"]
NEW_TOKENS = 24

_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0}
CONFIGS = {  # heads of 32: vLLM takes no smaller ones on a CPU
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=64, **_COMMON),
    "llama": LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        **_COMMON,
    ),
}


class World:
    """A base model and reward models over it."""

    def __init__(self, family: str, folder: Path):
        self.base = folder / family
        self.guides = {kind: f"{folder / kind}:nice=4,rude=-6" for kind in ("q", "v")}
        self.guides["nice"] = f"{folder / 'q'}:nice=1"
        self.guides["last"] = f"{folder / 'last'}:nice=30,rude=-20"  # which reads the last layer of the base alone
        self.guides["layers"] = f"{folder / 'layers'}:nice=30,rude=-20"  # which reads two of its layers
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(CONFIGS[family])
        with torch.no_grad():
            for parameter in lm.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(6)
        with quiet():
            lm.save_pretrained(self.base)
            TOKENIZER.save_pretrained(self.base)
            for kind in ("q", "v"):
                make_reward(kind, self.base).save_pretrained(folder / kind)
            make_readout(self.base, 1).save_pretrained(folder / "last")
            make_readout(self.base, 2).save_pretrained(folder / "layers")
        self.lm = load_causal_lm(self.base)

    def own(self, guide: str | list[str] | None, prompts: list[str] = PROMPTS, **options: Any) -> list[list[int]]:
        """The greedy tokens of radq.generate, with the sum of the guides."""
        loaded = _load((guide,) if isinstance(guide, str) else tuple(guide or ()))
        fixed = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "top_k": 6, "stop_token_ids": [], "kl_budget": None}
        options = {**fixed, **options}
        return [g.token_ids for g in generate(self.lm, TOKENIZER, prompts, loaded, **options)]


def make_readout(base: Path, num_layers: int) -> RadQ:
    """A readout with random weights."""
    torch.manual_seed(2)
    model = RadQ.from_base(base, ["nice", "rude"], num_layers=num_layers, width=32)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        for weight in trained.values():
            weight.copy_(torch.randn_like(weight) * 0.3)
    return model.eval()


@lru_cache(maxsize=64)
def _load(specifications: tuple[str, ...]) -> Guide | None:
    return load_guides([GuideSpec.parse(one) for one in specifications])
