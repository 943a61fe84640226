"""The transformers host: right under every update of decoding that shows a processor its texts in its own order."""

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from families import BOS, VOCAB, make_lm, make_number_tokenizer, make_reward
from instruments import LargestTensor
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LogitsProcessor, PreTrainedModel

from radq.decoding.generate import generate
from radq.errors import OptionError, RewardValueError, VocabularyError
from radq.guides.reward import RewardGuide
from radq.hosts.transformers import GuidedLogitsProcessor, _plan_update
from radq.models.reward import RewardModel

TOKENIZER = make_number_tokenizer()
WEIGHTS = {"nice": 4.0, "rude": -6.0}
PROMPTS = ["5 9 3 12 30", "11", "6 6 31 14 3 8 20 21"]
KINDS = ["q", "v"]


def make(kind: str, lm_folders: dict[str, Path], family: str = "gpt2") -> tuple[PreTrainedModel, RewardModel]:
    return make_lm(family).double(), make_reward(kind, lm_folders[family])


def encode(prompts: list[str]) -> dict[str, Tensor]:
    batch = TOKENIZER(prompts, padding=True, return_tensors="pt")
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def run(lm: PreTrainedModel, processor: Any, prompts: list[str], **options: Any) -> list[list[int]]:
    inputs = encode(prompts)
    output = lm.generate(**inputs, logits_processor=[processor], max_new_tokens=6, eos_token_id=None, **options)
    return output[:, inputs["input_ids"].shape[1] :].tolist()


class Recomputing(LogitsProcessor):
    """The same guidance by brute force: every row from scratch, at every call."""

    def __init__(self, lm: PreTrainedModel, model: RewardModel, num_padding: list[int], **options: Any):
        self.lm, self.model, self.num_padding, self.options = lm, model, num_padding, options

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore
        copies = len(input_ids) // len(self.num_padding)
        rows = []
        for row, base in enumerate(scores):
            text = input_ids[row, self.num_padding[row // copies] :].tolist()
            guided = oracle.guided_logits(self.lm, self.model, WEIGHTS, text, **self.options)
            plain = oracle.base_logits(self.lm, text)
            rows.append(guided - plain + base)  # beam search hands over sums of log-probabilities
        return torch.stack(rows)


def recomputing(lm: PreTrainedModel, model: RewardModel, prompts: list[str], **options: Any) -> Recomputing:
    num_padding = (encode(prompts)["attention_mask"] == 0).sum(1).tolist()
    return Recomputing(lm, model, num_padding, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_k": 1}, {"top_k": None}, {"top_k": 8, "top_p": 0.7}])
@pytest.mark.parametrize("clamp", [True, False])
def test_scores_equal_brute_force_on_a_left_padded_batch(
    kind: str, options: dict[str, Any], clamp: bool, lm_folders: dict[str, Path]
) -> None:
    lm, model = make(kind, lm_folders, "llama")
    inputs = encode(PROMPTS)
    guide = RewardGuide(model, WEIGHTS, clamp)
    processor = GuidedLogitsProcessor(guide, inputs["attention_mask"], kl_budget=None, **options)
    reference = recomputing(lm, model, PROMPTS, clamp=clamp, **options)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for token in (7, 20, 9):
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            scores = lm(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
        before = scores.clone()
        guided = processor(ids, scores)
        assert torch.equal(scores, before)  # never written to
        torch.testing.assert_close(guided, reference(ids, scores), atol=1e-5, rtol=1e-5)
        ids = torch.cat([ids, torch.full((3, 1), token)], dim=1)
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 3, "top_k": 0},
    ],
)
def test_generate_gives_the_texts_of_brute_force(
    kind: str, options: dict[str, Any], lm_folders: dict[str, Path]
) -> None:
    lm, model = make(kind, lm_folders)
    guide, mask = RewardGuide(model, WEIGHTS), encode(PROMPTS)["attention_mask"]
    processor = GuidedLogitsProcessor(guide, mask, top_k=6, kl_budget=None)
    torch.manual_seed(0)
    actual = run(lm, processor, PROMPTS, **options)
    torch.manual_seed(0)
    assert actual == run(lm, recomputing(lm, model, PROMPTS, top_k=6), PROMPTS, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_agrees_with_our_own_loop(kind: str, lm_folders: dict[str, Path]) -> None:
    lm, model = make(kind, lm_folders, "gemma3")
    guide = RewardGuide(model, WEIGHTS)
    own = generate(lm, TOKENIZER, PROMPTS, guide, temperature=0, max_new_tokens=6, stop_token_ids=[])
    processor = GuidedLogitsProcessor(guide, encode(PROMPTS)["attention_mask"], stop_token_ids=[])
    assert run(lm, processor, PROMPTS, do_sample=False) == [g.token_ids for g in own]


@pytest.mark.parametrize("kind", KINDS)
def test_one_processor_serves_prompt_after_prompt(kind: str, lm_folders: dict[str, Path]) -> None:
    lm, model = make(kind, lm_folders)
    guide = RewardGuide(model, WEIGHTS)
    plain = GuidedLogitsProcessor(guide)
    for prompt in ("5 9 3", "5 9 3", "5 9 4 4", "7", "5 9 3 12 30 8"):  # equal, related, shorter, longer
        assert run(lm, plain, [prompt], do_sample=False) == run(
            lm, GuidedLogitsProcessor(guide), [prompt], do_sample=False
        )
    padded = GuidedLogitsProcessor(guide, encode(PROMPTS)["attention_mask"])
    for prompts in (PROMPTS, PROMPTS, ["5", "6 7 8"], ["5 6"], [*PROMPTS, "9 9"]):
        fresh = GuidedLogitsProcessor(guide, encode(prompts)["attention_mask"])
        assert run(lm, padded, prompts, do_sample=False) == run(lm, fresh, prompts, do_sample=False)


@pytest.mark.parametrize("kind", KINDS)
def test_assisted_decoding_gives_the_texts_of_plain_decoding(kind: str, lm_folders: dict[str, Path]) -> None:
    lm, model = make(kind, lm_folders)
    guide = RewardGuide(model, WEIGHTS)
    torch.manual_seed(5)
    assistant = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2, n_positions=64, bos_token_id=BOS, eos_token_id=2)
    ).double()
    for prompt in PROMPTS:
        plain = run(lm, GuidedLogitsProcessor(guide), [prompt], do_sample=False)
        assert run(lm, GuidedLogitsProcessor(guide), [prompt], do_sample=False, assistant_model=assistant) == plain
        assert run(lm, GuidedLogitsProcessor(guide), [prompt], do_sample=False, prompt_lookup_num_tokens=3) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_calls_is_followed(kind: str, lm_folders: dict[str, Path]) -> None:
    """Rollback, growth by several tokens, rows that swap, appear and vanish."""
    lm, model = make(kind, lm_folders)
    processor = GuidedLogitsProcessor(RewardGuide(model, WEIGHTS), top_k=5, kl_budget=None)
    reference = Recomputing(lm, model, [0], top_k=5)
    calls = [
        [[5, 9, 3]],
        [[5, 9, 3, 4]],
        [[5, 9, 3, 4]],
        [[5, 9, 3, 8, 8]],
        [[5, 9]],
        [[5, 9, 7], [5, 9, 8]],
        [[5, 9, 8, 3], [5, 9, 7, 4], [5, 9, 8, 5]],
        [[5, 9, 8, 5, 6, 7, 8, 9, 10, 11]],
        [[7]],
    ]
    for texts in calls:
        ids = torch.tensor(texts)
        scores = torch.stack([oracle.base_logits(lm, text) for text in texts])
        torch.testing.assert_close(processor(ids, scores), reference(ids, scores), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_one_token(kind: str, lm_folders: dict[str, Path]) -> None:
    lm, model = make(kind, lm_folders)
    run(lm, GuidedLogitsProcessor(RewardGuide(model, WEIGHTS)), PROMPTS[:1], do_sample=False)
    shapes: list[tuple[int, int]] = []
    model.backbone.register_forward_pre_hook(
        lambda _, __, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True
    )
    processor = GuidedLogitsProcessor(RewardGuide(model, WEIGHTS), top_k=7)
    run(lm, processor, PROMPTS[:1], do_sample=False, num_beams=3)
    prompt = (1, 6)  # once, BOS included, not once per beam
    steps = [(3, 1)] * 5 if kind == "q" else [(3, 7)] * 6
    assert shapes == [prompt, *steps]


def test_beams_are_found_without_comparing_all_with_all() -> None:
    """256 rows of 600 tokens that change places at every step: memory grows with the rows, not with their square."""
    torch.manual_seed(0)
    known = torch.randint(3, VOCAB, (256, 600))
    chosen = torch.randint(256, (256,))
    texts = torch.cat([known[chosen], torch.randint(3, VOCAB, (256, 1))], dim=1)
    with LargestTensor() as peak:
        update = _plan_update(known, texts, VOCAB)
    assert update is not None
    assert update.rows is not None
    assert torch.equal(known[update.rows], texts[:, :600])
    assert update.rewind == 0
    assert update.tokens is not None
    assert torch.equal(update.tokens, texts[:, 600])
    assert peak.bytes <= 8 * 2 * known.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_without_its_mask_is_refused(kind: str, toy: Path, lm_folders: dict[str, Path]) -> None:
    lm, model = make(kind, lm_folders)  # whose configuration names BOS, EOS and padding
    guide = RewardGuide(model, WEIGHTS)
    inputs = encode(PROMPTS)["input_ids"]
    refused = [inputs, inputs[1:2], torch.tensor([[0, 5], [6, 7]]), torch.tensor([[2, 2, 5], [2, 2, 6]])]
    for ids in refused:
        with pytest.raises(OptionError, match="no attention_mask.*pass attention_mask="):
            GuidedLogitsProcessor(guide)(ids, torch.zeros(len(ids), VOCAB))
    plain = [torch.tensor([[5, 6], [7, 7]]), torch.tensor([[BOS, 5], [BOS, 6]]), torch.tensor([[6, 6, 5]])]
    plain.append(torch.tensor([[BOS, 2, 5], [BOS, 2, 6]]))  # a BOS and another special token, as in a chat
    for ids in plain:
        GuidedLogitsProcessor(guide)(ids, torch.zeros(len(ids), VOCAB))
        GuidedLogitsProcessor(guide, torch.ones_like(ids))(ids, torch.zeros(len(ids), VOCAB))


def test_a_mask_without_padding_says_nothing_about_later_prompts(lm_folders: dict[str, Path]) -> None:
    _, model = make("q", lm_folders)
    processor = GuidedLogitsProcessor(RewardGuide(model, WEIGHTS), torch.ones(1, 3, dtype=torch.long))
    processor(torch.tensor([[0, 0, 5]]), torch.zeros(1, VOCAB))  # the mask says that these are no padding
    with pytest.raises(OptionError, match="attention_mask"):
        processor(torch.tensor([[0, 0, 0, 7]]), torch.zeros(1, VOCAB))
    processor(torch.tensor([[6, 9, 7]]), torch.zeros(1, VOCAB))


def test_padding_by_a_token_of_the_bases_tokenizer_is_seen(lm_folders: dict[str, Path]) -> None:
    tokenizer = make_number_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "36"})
    _, model = make("q", lm_folders)
    ids = torch.tensor([[36, 36, 5], [6, 7, 8]])
    with pytest.raises(OptionError, match="attention_mask"):
        GuidedLogitsProcessor(RewardGuide(model, WEIGHTS), tokenizer=tokenizer)(ids, torch.zeros(2, VOCAB))


def test_a_budget_and_a_temperature_of_its_own(lm_folders: dict[str, Path]) -> None:
    lm, model = make("q", lm_folders)
    scores = torch.randn(1, VOCAB, dtype=torch.float64)
    ids = torch.tensor([[5, 6]])
    cold = GuidedLogitsProcessor(RewardGuide(model, {"nice": 0.0}), top_k=None, temperature=0.5)
    torch.testing.assert_close(cold(ids, scores), 2 * scores, atol=1e-5, rtol=1e-5)
    tied = GuidedLogitsProcessor(RewardGuide(model, WEIGHTS), top_k=None, kl_budget=0.0)
    torch.testing.assert_close(tied(ids, scores), scores, atol=1e-5, rtol=1e-5)
    with pytest.raises(OptionError, match="temperature must be above 0"):
        GuidedLogitsProcessor(RewardGuide(model, WEIGHTS), temperature=0.0)


def test_mistakes_are_named(lm_folders: dict[str, Path]) -> None:
    lm, model = make("q", lm_folders)
    guide = RewardGuide(model, WEIGHTS)
    ids = torch.tensor([[5, 6]])
    with pytest.raises(VocabularyError, match="50 tokens.*37"):
        GuidedLogitsProcessor(guide)(ids, torch.zeros(1, 50))
    with pytest.raises(OptionError, match=r"\(1, 5\).*\(1, 2\)"):
        GuidedLogitsProcessor(guide, torch.ones(1, 5, dtype=torch.long))(ids, torch.zeros(1, VOCAB))
    with pytest.raises(OptionError, match="top_k must be at most 37"):
        GuidedLogitsProcessor(guide, top_k=38)(ids, torch.zeros(1, VOCAB))
    with torch.no_grad():
        model.head.weight[0] = float("nan")
    with pytest.raises(RewardValueError):
        GuidedLogitsProcessor(guide)(ids, torch.zeros(1, VOCAB))
