"""The texts of single tokens, as they are shown to clients."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from radq.decoding.text import UNFINISHED

ANCHOR = "a"  # single tokens are decoded after it, since some tokenizers drop a space at the beginning of a text


class TokenTexts:
    """Shows the tokens of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self._anchor = tokenizer(ANCHOR, add_special_tokens=False).input_ids
        self._before = str(tokenizer.decode(self._anchor))
        self.show = lru_cache(maxsize=65536)(self._show)

    def _show(self, token: int) -> str:
        """Show a single token as text, with its space; special tokens are shown by their names."""
        if token in self.tokenizer.all_special_ids:
            return str(self.tokenizer.convert_ids_to_tokens(token))
        return self._decode([token])

    def show_each(self, tokens: Sequence[int]) -> list[str]:
        """Show the tokens of a text. Of several that share a character, the last one shows it, and the others nothing.

        Special tokens are shown by their names.
        """
        found: list[str] = []
        held: list[int] = []  # tokens of a character that is not whole yet
        for token in tokens:
            shown = self._decode([*held, token]) if held else self.show(token)
            whole = token in self.tokenizer.all_special_ids or not shown.endswith(UNFINISHED)
            held = [] if whole else [*held, token]
            found.append(shown if whole else "")
        if held:
            found[-1] = self._decode(held)
        return found

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*self._anchor, *tokens]))[len(self._before) :]
