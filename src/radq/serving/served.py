"""The loaded models of a server: a base model, its tokenizer, and the guides that clients may name."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from radq.guides import RewardGuide
from radq.models.loading import Wrappable, find_device, load, max_positions, num_logits
from radq.models.reward import RewardModel
from radq.models.trial import choose_dtype
from radq.models.vocabulary import find_bos, tokenise
from radq.numerics import log_probabilities
from radq.serving.config import ServeConfig
from radq.serving.panel import Panel

UNLIMITED = 2**31  # tokens of a text, where no model has a limit
ANCHOR = "a"  # single tokens are decoded after it, since some tokenizers drop a space at the beginning of a text


class Served:
    """A base model with guides."""

    def __init__(self, config: ServeConfig):
        self.config, self.device = config, find_device(config.device)
        self.lm: Wrappable
        self.tokenizer: PreTrainedTokenizerBase
        self.dtype = choose_dtype(config.dtype, config.base, self.device)
        self.lm, self.tokenizer = load(config.base, self.device, self.dtype)
        self.panel = Panel.load(config.guides, str(self.device), self.dtype, self.lm)
        for guide in self.panel.guides:
            guide.check_base(self.lm)
            guide.check_vocabulary(num_logits(self.lm), self.tokenizer, config.base_id)
        self.context = self._find_context()
        self.has_chat = getattr(self.tokenizer, "chat_template", None) is not None
        self._anchor = self.tokenizer(ANCHOR, add_special_tokens=False).input_ids
        self._before = str(self.tokenizer.decode(self._anchor))
        self.show_token = lru_cache(maxsize=65536)(self._show_token)

    def _find_context(self) -> int:
        """The most tokens of a text that the base model and all guides have positions for."""
        rooms = [max_positions(self.lm.config), *(guide.context for guide in self.panel.guides)]
        return min((room for room in rooms if room is not None), default=UNLIMITED)

    def reward_model(self, name: str) -> tuple[RewardModel, int] | None:
        """The reward model behind a name, and the column of its rewards; None for experts."""
        number, place = self.panel.places[name]
        guide = self.panel.guides[number]
        return (guide.model, guide.columns[place]) if isinstance(guide, RewardGuide) else None

    def reward_range(self, name: str) -> tuple[float, float] | None:
        """The lowest and highest reward of a guide; None for a guide without a reward model."""
        found = self.reward_model(name)
        return None if found is None else found[0].config.attribute_ranges[found[1]]

    def _show_token(self, token: int) -> str:
        """The text of a single token, with its space; special tokens are shown by their names."""
        if token in self.tokenizer.all_special_ids:
            return str(self.tokenizer.convert_ids_to_tokens(token))
        return str(self.tokenizer.decode([*self._anchor, token]))[len(self._before) :]

    # --- scores of texts ---

    def encode(self, text: str) -> list[int]:
        return tokenise(self.tokenizer, [text], find_bos(self.lm.config, self.tokenizer))[0]

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The log-probability of each token under the base model, and its reward by each guide with a reward model."""
        input_ids = torch.tensor([list(token_ids)], device=self.lm.device)
        logits = self.lm(input_ids=input_ids).logits[0, :-1]
        likelihoods = log_probabilities(logits, input_ids[0, 1:]).tolist()
        rewards = self._token_rewards(input_ids)
        tokens = [
            {
                "id": token,
                "token": self.show_token(token),
                "logprob": likelihoods[place - 1] if place else None,
                "rewards": {name: values[place] for name, values in rewards.items()},
            }
            for place, token in enumerate(token_ids)
        ]
        mean = sum(likelihoods) / len(likelihoods) if likelihoods else 0.0
        last = {name: values[-1] for name, values in rewards.items()}
        return {"tokens": tokens, "rewards": last, "perplexity": perplexity(mean)}

    def _token_rewards(self, input_ids: torch.Tensor) -> dict[str, list[float]]:
        """The reward of each token by each name; a model that several names share reads the text once."""
        found = {name: pair for name in self.config.guides if (pair := self.reward_model(name)) is not None}
        read: dict[RewardModel, torch.Tensor] = {}  # (t, attributes)
        for model, _ in found.values():
            if model not in read:
                read[model] = model.token_rewards(input_ids.to(model.device))[0]
        return {
            name: read[model][:, column].clamp(*model.config.attribute_ranges[column]).tolist()
            for name, (model, column) in found.items()
        }


def perplexity(mean_log_probability: float) -> float:
    """exp(−mean); finite also where a token is impossible for the base model."""
    return math.exp(min(-mean_log_probability, 700.0))
