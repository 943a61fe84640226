"""Vocabularies: a fingerprint that tells whether two models have the same tokens, and the special tokens."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from radq.errors import ModelError, VocabularyError
from radq.numerics import weakly_cached


class Vocabulary(NamedTuple):
    """The tokens of a model. `fingerprint` covers those with ids below `num_tokens`; None if there was no tokenizer."""

    size: int  # rows of the embedding: may exceed num_tokens, since many models pad it
    num_tokens: int | None = None
    fingerprint: str | None = None

    @property
    def num_known(self) -> int:
        """The number of tokens that the model knows: those with smaller ids."""
        return self.num_tokens or self.size


def read_vocabulary(size: int, tokenizer: PreTrainedTokenizerBase | None) -> Vocabulary:
    if tokenizer is None:
        return Vocabulary(size)
    num_tokens = min(size, 1 + max(tokenizer.get_vocab().values()))
    return Vocabulary(size, num_tokens, _fingerprint(tokenizer, num_tokens, len(tokenizer)))


def check_vocabulary(
    guide: Vocabulary,
    base_size: int,
    base_tokenizer: PreTrainedTokenizerBase | None,
    base_name: str,
    guide_name: str = "reward model",
) -> None:
    """Refuse a base model whose token ids mean something else.

    Tokens that the base has beyond the guide's (an added padding token, say) are no obstacle: they stay candidates, and
    the guide neither favours nor punishes them. Without two tokenizers to compare, the sizes must agree.
    """
    if guide.fingerprint is not None and guide.num_tokens is not None and base_tokenizer is not None:
        same = _fingerprint(base_tokenizer, guide.num_tokens, len(base_tokenizer)) == guide.fingerprint
    else:
        same = base_size == guide.size
    if not same:
        raise VocabularyError(
            f"the vocabulary of {base_name} ({base_size} tokens) is not the {guide_name}'s ({guide.size} tokens).",
            f"a {guide_name} guides base models with its own tokenizer; train or convert one on that family's backbone"
            + (" (or pass tokenizer= if the sizes differ only by padding)." if base_tokenizer is None else "."),
        )


@weakly_cached
def _fingerprint(tokenizer: PreTrainedTokenizerBase, num_tokens: int, length: int) -> str:
    """Compute the fingerprint of a tokenizer of this length; it takes longer than to decode a short text."""
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index < num_tokens)
    return hashlib.sha256("\n".join(f"{index}\t{token}" for index, token in tokens).encode()).hexdigest()


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], bos: int) -> list[list[int]]:
    """Tokenise texts with special tokens; one that begins with a BOS, as chat templates write it, gets no second."""
    if not texts:
        return []
    rows = tokenizer(list(texts), verbose=False).input_ids
    for number, row in enumerate(rows):
        if row[:2] == [bos, bos]:
            written = tokenizer(texts[number], add_special_tokens=False, verbose=False).input_ids
            if 1 <= _count_leading(written, bos) < _count_leading(row, bos):
                rows[number] = row[1:]
    return rows


def find_control_tokens(tokenizer: PreTrainedTokenizerBase, value: Any) -> list[str]:
    """Find the names of special tokens that stand in texts, maybe inside lists and dictionaries, longest first."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    left, found = [value], set()
    while left:
        item = left.pop()
        if isinstance(item, str):
            found |= {name for name in special if name in item}
        elif isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
    return sorted(found, key=len, reverse=True)


def tokenise_plainly(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenise a text in which the names of special tokens are characters like any others."""
    return _make_plain(tokenizer).encode(text, add_special_tokens=False).ids


@weakly_cached
def _make_plain(tokenizer: PreTrainedTokenizerBase) -> Any:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("this tokenizer cannot read the names of special tokens as text.", "leave them out.")
    plain = type(backend).from_str(backend.to_str())  # one of its own, since threads share tokenizers
    plain.encode_special_tokens = True
    return plain


# Pre-tokenizers of tokenizers that leave no character out.
KEEPING = {"ByteLevel", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}


def exceeds(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> bool:
    """Whether a text has more than so many tokens for certain. Its length tells, so that it need not be tokenised."""
    longest = _find_longest_token(tokenizer, len(tokenizer))
    if longest is None or len(text) <= longest * tokens:
        return False
    backend: Any = tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    normalizer = backend.normalizer
    return normalizer is None or len(normalizer.normalize_str(text)) > longest * tokens


@weakly_cached
def _find_longest_token(tokenizer: PreTrainedTokenizerBase, length: int) -> int | None:
    """The most characters of a normalised text that one token can stand for; None where there is no such number."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    bounded = backend is not None and _is_bounded(json.loads(backend.to_str()))
    return max(map(len, tokenizer.get_vocab())) if bounded else None


def _is_bounded(described: Mapping[str, Any]) -> bool:
    """Whether no token stands for an unlimited number of characters, and no character is left out."""
    model, pre = described["model"], described["pre_tokenizer"]
    writes_bytes = "ByteLevel" in json.dumps([pre, described["normalizer"]])
    one_by_one = not model.get("fuse_unk", True) and (writes_bytes or model["unk_token"] is not None)
    strips = any(token["lstrip"] or token["rstrip"] for token in described["added_tokens"])
    return (one_by_one or bool(model.get("byte_fallback"))) and not strips and _keeps(pre)


def _keeps(pre: Mapping[str, Any] | None) -> bool:
    if pre is None or pre["type"] == "Sequence":
        return all(_keeps(part) for part in (pre or {}).get("pretokenizers", []))
    return pre["type"] in KEEPING and pre.get("behavior") != "Removed"


def _count_leading(row: Sequence[int], token: int) -> int:
    return next((place for place, other in enumerate(row) if other != token), len(row))


def find_bos(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The token before the first one; the end-of-text token where a family (such as Qwen) has no BOS."""
    known = [] if tokenizer is None else [tokenizer.bos_token_id, tokenizer.eos_token_id]
    if found := _list_tokens(*known, config.bos_token_id, config.eos_token_id):
        return found[0]
    raise ModelError("neither tokenizer nor configuration name a BOS or EOS token.", "set bos_token_id in config.json.")


def writes_bos(tokenizer: PreTrainedTokenizerBase | None, bos: int) -> bool:
    """Whether a tokenizer writes a BOS before every text by itself."""
    return tokenizer is not None and tokenizer("a").input_ids[:1] == [bos]


def find_special_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """The ids of tokens that mark beginnings, ends and padding, by tokenizer and configuration."""
    known = [] if tokenizer is None else tokenizer.all_special_ids
    return {*_list_tokens(*known, config.bos_token_id, config.eos_token_id, config.pad_token_id)}


def _list_tokens(*given: Any) -> list[int]:
    return [token for one in given for token in (one if isinstance(one, list) else [one]) if token is not None]
