"""The loaded models of a server: a base model, its tokenizer, and the guides that clients may name."""

import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import add
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from radq.errors import ContextLengthError
from radq.guides import Guide, RewardGuide
from radq.guides.spec import MakeGuide, guide_maker
from radq.models.loading import Wrappable, find_device, load, max_positions, num_logits
from radq.models.trial import choose_dtype
from radq.models.vocabulary import find_bos, tokenise
from radq.numerics import log_probabilities
from radq.serving.config import GuideEntry, ServeConfig

ANCHOR = "a"  # single tokens are decoded after it, since some tokenizers drop a space at the beginning of a text


class Served:
    """A base model with guides. Guides that share a folder share its models, and one reading of each text."""

    def __init__(self, config: ServeConfig):
        self.config, self.device = config, find_device(config.device)
        self.lm: Wrappable
        self.tokenizer: PreTrainedTokenizerBase
        self.dtype = choose_dtype(config.dtype, config.base, self.device)
        self.lm, self.tokenizer = load(config.base, self.device, self.dtype)
        self._makers: dict[str, MakeGuide] = {}
        self._guides: dict[tuple[str, ...], Guide] = {}
        self.context = max_positions(self.lm.config) or 2**31
        self.has_chat = getattr(self.tokenizer, "chat_template", None) is not None
        for name in config.guides:
            self._check(self.guide((name,)))
        self._anchor = self.tokenizer(ANCHOR, add_special_tokens=False).input_ids
        self._before = str(self.tokenizer.decode(self._anchor))
        self.show_token = lru_cache(maxsize=65536)(self._show_token)

    def _check(self, guide: Guide) -> None:
        """Refuse a guide with another vocabulary; texts are limited to what it has room for."""
        guide.check_vocabulary(num_logits(self.lm), self.tokenizer, self.config.base_id)
        longest, shortest = self.context, 1
        while shortest < longest:  # the longest text that the guide can follow
            middle = (shortest + longest + 1) // 2
            try:
                guide.check_length(middle)
                shortest = middle
            except ContextLengthError:
                longest = middle - 1
        self.context = shortest

    def order(self, names: Sequence[str]) -> tuple[str, ...]:
        """Names of guides in the order of the strengths of their guide: those that share a folder stand together."""
        groups: dict[Any, list[str]] = {}
        for name in self.config.guides:
            if name in names:
                groups.setdefault(_group(self.config.guides[name]), []).append(name)
        return tuple(name for group in groups.values() for name in group)

    def guide(self, names: tuple[str, ...]) -> Guide:
        """The guide with a strength for each of these names, which `order` has put in order."""
        if names not in self._guides:
            groups: dict[Any, list[GuideEntry]] = {}
            for name in names:
                entry = self.config.guides[name]
                groups.setdefault(_group(entry), []).append(entry)
            self._guides[names] = reduce(add, [self._make(entries) for entries in groups.values()])
        return self._guides[names]

    def _make(self, entries: Sequence[GuideEntry]) -> Guide:
        folder = entries[0].folder
        if folder not in self._makers:
            self._makers[folder] = guide_maker(folder, self.device, self.dtype)
        return self._makers[folder]({entry.strength: entry.default for entry in entries} | entries[0].options)

    def reward_range(self, name: str) -> tuple[float, float] | None:
        """The lowest and highest reward of a guide; None for a guide without a reward model."""
        guide = self.guide((name,))
        return guide.model.config.attribute_ranges[guide.columns[0]] if isinstance(guide, RewardGuide) else None

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
        rewards = {name: values for name in self.config.guides if (values := self._token_rewards(name, input_ids))}
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

    def _token_rewards(self, name: str, input_ids: torch.Tensor) -> list[float]:
        guide = self.guide((name,))
        if not isinstance(guide, RewardGuide):
            return []
        column = guide.columns[0]
        rewards = guide.model.token_rewards(input_ids.to(guide.model.device))[0, :, column]
        return rewards.clamp(*guide.model.config.attribute_ranges[column]).tolist()


def perplexity(mean_log_probability: float) -> float:
    """exp(−mean); finite also where a token is impossible for the base model."""
    return math.exp(min(-mean_log_probability, 700.0))


def _group(entry: GuideEntry) -> Any:
    """What guides share that can be one guide with several strengths."""
    return entry.folder, tuple(sorted(entry.options.items()))
