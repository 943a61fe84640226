"""The loaded models of a server: a base model, its tokenizer, and the guides that clients may name."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from radq.decoding.text import check_size
from radq.models.loading import Wrappable, choose_dtype, find_device, load, max_positions, num_logits
from radq.models.prefill import InTurns, Turn
from radq.models.vocabulary import find_bos, tokenise
from radq.registry.config import ServeConfig
from radq.registry.details import TokenTexts, check_scored, describe_scores
from radq.registry.loaded_guides import LoadedGuides

UNLIMITED = 2**31  # tokens of a text, where no model has a limit


class Served:
    """A base model with guides."""

    def __init__(self, config: ServeConfig):
        self.config, self.device = config, find_device(config.device)
        self.lm: Wrappable
        self.tokenizer: PreTrainedTokenizerBase
        self.dtype = choose_dtype(config.dtype, config.base, self.device)
        self.lm, self.tokenizer = load(config.base, self.device, self.dtype)
        self.loaded = LoadedGuides.load(config.guides, str(self.device), self.dtype, self.lm)
        for guide in self.loaded.guides:
            guide.check_base(self.lm)
            guide.check_vocabulary(num_logits(self.lm), self.tokenizer, config.base_id)
        self.context = self._find_context()
        self.has_chat = getattr(self.tokenizer, "chat_template", None) is not None
        self.texts = TokenTexts(self.tokenizer)
        self.show_token = self.texts.show

    def _find_context(self) -> int:
        """The most tokens of a text that the base model and all guides have positions for."""
        rooms = [max_positions(self.lm.config), *(guide.context for guide in self.loaded.guides)]
        return min((room for room in rooms if room is not None), default=UNLIMITED)

    # --- scores of texts ---

    def encode(self, text: str) -> list[int]:
        """Tokenise a text to be scored, unless it is too long."""
        limit = min(self.config.limits.prompt_tokens, self.context)
        check_size(self.tokenizer, text, limit)
        ids = tokenise(self.tokenizer, [text], find_bos(self.lm.config, self.tokenizer))[0]
        check_scored(text, ids, limit)
        return ids

    def score(self, token_ids: Sequence[int], turn: Turn) -> InTurns[dict[str, Any]]:
        """Compute the log-probability of each token under the base model, and its reward by each reward model."""
        scores = yield from self.loaded.score(self.lm, token_ids, turn)
        return describe_scores(token_ids, *scores, self.texts.show_each)
