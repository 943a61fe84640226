"""The texts of single tokens, and of the tokens of a text."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from radq.registry.details import TokenTexts


def make_texts() -> TokenTexts:
    """The tokens are bytes, and there is a special one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return TokenTexts(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


TEXTS = make_texts()


@given(st.text("a é字🙂مرح日本\ufffd", max_size=12))
def test_tokens_of_a_text_show_whole_characters(text: str) -> None:
    ids = TEXTS.tokenizer(text).input_ids
    shown = TEXTS.show_each(ids)
    assert len(shown) == len(ids)
    assert "".join(shown) == text
    assert "\ufffd" in text or not any("\ufffd" in one for one in shown)


def test_the_last_token_of_a_character_shows_it() -> None:
    assert TEXTS.show_each(TEXTS.tokenizer("a字b").input_ids) == ["a", "", "", "字", "b"]


@given(st.text("abc .\n<>", max_size=12))
def test_tokens_of_ascii_are_shown_as_if_alone(text: str) -> None:
    ids = TEXTS.tokenizer(f"{text}<end>").input_ids
    assert TEXTS.show_each(ids) == [TEXTS.show(one) for one in ids] == [*text, "<end>"]
