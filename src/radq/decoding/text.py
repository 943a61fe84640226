"""Text from tokens as they come: pieces that are final, and texts that end at a stop string.

text = GrowingText(tokenizer, prompt, stops=["\\n"])
for token in ticket:
    print(text.add(token.id), end="")
print(text.end(), end="")
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what tokenizers write for the first bytes of a character


def continue_text(before: str, whole: str) -> str | None:
    """Cut a text off before its continuation; None if the whole does not begin with it.

    Tokens may end inside a character. Then the continuation begins with this character, once it is whole.
    """
    begins = (before, before.rstrip(UNFINISHED))
    return next((whole[len(begin) :] for begin in begins if whole.startswith(begin)), None)


class GrowingText:
    """The text of a continuation. Pieces are given out as soon as later tokens can no longer change them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        min_new_tokens: int = 0,
    ):
        """
        Args:
            stops: texts that end the text, which is cut off before the first of them.
            min_new_tokens: a stop text that is complete before there are so many tokens ends nothing.
        """
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        self._free = min_new_tokens  # tokens until stop texts end the text
        self._searched = 0  # characters in which stop texts have been looked for
        self.text = ""  # up to a stop string, which is not part of it
        self.stopped = False
        # Decoded together with some tokens before, since some tokenizers drop a space at the beginning of a text.
        self._window = list(prompt[-8:])
        self._before = self._decode(self._window)
        self._given = 0

    def add(self, token: int) -> str:
        """Add a token; return the piece of text that has become final."""
        if self.stopped:
            return ""
        self._window.append(token)
        self._free -= 1
        whole = self._decode(self._window)
        if whole.endswith(UNFINISHED):
            return ""
        self.text += self._continue(whole)
        self._window = self._window[-8:]
        self._before = self._decode(self._window)
        begins = (max(0, self._searched - len(stop) + 1) for stop in self.stops)
        found = [self.text.find(stop, begin) for stop, begin in zip(self.stops, begins, strict=True)]
        places = [place for place in found if place >= 0]
        if places and self._free <= 0:
            self.stopped, self.text = True, self.text[: min(places)]
        self._searched = len(self.text)
        return self._give(len(self.text) if self.stopped else len(self.text) - self._held_back())

    def end(self) -> str:
        """The rest of the text, when no more tokens will come. A character that is not whole is left out."""
        if not self.stopped:
            whole = self._decode(self._window)
            self.text, self._before = self.text + self._continue(whole).rstrip(UNFINISHED), whole
        return self._give(len(self.text))

    def _continue(self, whole: str) -> str:
        rest = continue_text(self._before, whole)
        return whole[len(self._before) :] if rest is None else rest

    def _give(self, end: int) -> str:
        begin, self._given = self._given, max(self._given, end)
        return self.text[begin : self._given]

    def _held_back(self) -> int:
        """The number of last characters with which a stop string may have begun."""
        longest = min(max((len(stop) for stop in self.stops), default=1) - 1, len(self.text))
        ends = (self.text[len(self.text) - n :] for n in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self.stops)), 0)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
