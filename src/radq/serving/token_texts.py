"""The texts of single tokens, as they are shown to clients."""

from functools import lru_cache

from transformers import PreTrainedTokenizerBase

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
        return str(self.tokenizer.decode([*self._anchor, token]))[len(self._before) :]
