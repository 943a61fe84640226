"""Texts that are too long for any tokens are recognised by their length, and no text that fits is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from radq.decoding.text import encode_prompts
from radq.errors import ContextLengthError
from radq.models.vocabulary import exceeds


def make_bpe(normalizer: Any = None, added: AddedToken | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, whose longest token has eight letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["aa", "aaaa", "aaaaaaaa"]
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa")]
    backend = Tokenizer(BPE({token: number for number, token in enumerate([*letters, *words])}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    if added is not None:
        backend.add_special_tokens([added])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


PLAIN, COMPOSING = make_bpe(), make_bpe(normalizers.NFC())


@given(st.text("a 9é\u0301電🙂", max_size=60) | st.integers(0, 200).map(lambda n: "a" * n), st.integers(1, 20))
def test_no_text_that_fits_is_refused(text: str, tokens: int) -> None:
    for tokenizer in (PLAIN, COMPOSING):
        assert not exceeds(tokenizer, text, tokens) or len(tokenizer(text).input_ids) > tokens


def test_the_longest_texts_that_fit() -> None:
    assert not exceeds(PLAIN, "a" * 160, 20)
    assert exceeds(PLAIN, "a" * 161, 20)
    assert not exceeds(COMPOSING, "e\u0301" * 160, 20)  # 160 characters after the normaliser
    assert exceeds(COMPOSING, "e\u0301" * 161, 20)


def test_tokens_that_stand_for_any_number_of_characters() -> None:
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert not exceeds(PreTrainedTokenizerFast(tokenizer_object=words), "x" * 10**5, 1)
    assert not exceeds(make_bpe(added=AddedToken("<s>", lstrip=True)), " " * 10**5 + "<s>", 1)
    removing = make_bpe()
    removing.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    assert not exceeds(removing, " " * 10**5, 1)


def test_long_prompts_are_refused_before_they_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    from families import make_lm

    config, tokenizer, long = make_lm("gpt2").config, make_bpe(), "a " * 10**5
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts: list[Any] = [long, [{"role": "user", "content": long}]]
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", lambda *_, **__: pytest.fail("it was tokenised"))
    for prompt in prompts:
        with pytest.raises(ContextLengthError, match="200000 characters"):
            encode_prompts(config, tokenizer, [prompt], 1, context=4096, longest=100)
