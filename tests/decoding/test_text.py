"""Texts that grow token by token, stop strings, chats, and streams of text."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
from families import BOS, VOCAB, make_lm, make_number_tokenizer, make_reward
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from radq.decoding.config import Steering
from radq.decoding.generate import astream_text, generate, stream_text
from radq.decoding.text import GrowingText, decode_texts, encode_prompts
from radq.errors import OptionError
from radq.guides.reward import RewardGuide

TOKENIZER = make_number_tokenizer()


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerBase:
    vocabulary = {name: number for number, name in enumerate(sorted(ByteLevel.alphabet()))}
    tokens = Tokenizer(BPE(vocabulary, []))
    tokens.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from("ab é字🙂\n."), max_size=30), stops=st.lists(st.text("ab.\n", min_size=1, max_size=3))
)
def test_pieces_make_the_text_before_the_first_stop(
    text: str, stops: list[str], byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Tokens are bytes, so that characters come in parts."""
    growing, pieces = GrowingText(byte_tokenizer, [], stops), []
    for token in byte_tokenizer(text, add_special_tokens=False).input_ids:
        pieces.append(growing.add(token))
        assert "\ufffd" not in pieces[-1]
    pieces.append(growing.end())
    beginnings = (text[:n] for n in range(len(text) + 1))
    first = next((begin for begin in beginnings if any(stop in begin for stop in stops)), None)
    expected = text if first is None else first[: min(first.find(stop) for stop in stops if stop in first)]
    assert "".join(pieces) == growing.text == expected
    assert growing.stopped == (first is not None)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("a é字🙂"), min_size=1, max_size=12), places=st.tuples(*[st.integers(0, 40)] * 2))
def test_characters_are_whole_wherever_tokens_are_cut(
    text: str, places: tuple[int, int], byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A character that a prompt has begun is in the continuation, and one that is cut at the end is left out."""
    tokens = byte_tokenizer(text, add_special_tokens=False).input_ids
    begin, end = sorted(place % (len(tokens) + 1) for place in places)
    prompt, continuation = tokens[:begin], tokens[begin:end]
    before, whole = (text.encode()[:place].decode(errors="ignore") for place in (begin, end))
    growing = GrowingText(byte_tokenizer, prompt)
    pieces = [growing.add(token) for token in continuation]
    assert decode_texts(byte_tokenizer, [prompt], [continuation]) == [whole[len(before) :]]
    assert "".join([*pieces, growing.end()]) == growing.text == whole[len(before) :]


def test_a_piece_is_given_out_as_soon_as_no_stop_can_begin_in_it(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    growing = GrowingText(byte_tokenizer, [], ["ab"])
    tokens = byte_tokenizer("xaab", add_special_tokens=False).input_ids
    assert [growing.add(token) for token in tokens] == ["x", "", "a", ""]
    assert growing.text == "xa"


@pytest.mark.parametrize("stop", [[], ["9"], ["12 5", "7"]])
def test_streams_are_the_texts_of_generate(stop: list[str], lm_folders: dict[str, Path]) -> None:
    lm, guide = make_lm("gpt2"), RewardGuide(make_reward("q", lm_folders["gpt2"]), {"nice": 5.0})
    for seed in range(6):
        (whole,) = generate(lm, TOKENIZER, ["5 9"], guide, 5, max_new_tokens=12, seed=seed, stop=stop)
        options: dict[str, Any] = {"max_new_tokens": 12, "seed": seed, "stop": stop}
        assert "".join(stream_text(lm, TOKENIZER, "5 9", guide, Steering(5), **options)) == whole.text

        async def collect(options: dict[str, Any] = options) -> str:
            return "".join([piece async for piece in astream_text(lm, TOKENIZER, "5 9", guide, Steering(5), **options)])

        assert asyncio.run(collect()) == whole.text


def test_a_stop_text_ends_a_text_and_is_not_part_of_it() -> None:
    lm = make_lm("gpt2")
    (free,) = generate(lm, TOKENIZER, ["5 9"], max_new_tokens=12, stop_token_ids=[], seed=1)
    word = TOKENIZER.decode(free.token_ids[4])
    (cut,) = generate(lm, TOKENIZER, ["5 9"], max_new_tokens=12, stop_token_ids=[], seed=1, stop=[word])
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(word)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert cut.num_text_tokens == len(cut.token_ids)
    for wrong in ("x", ["x", ""]):
        with pytest.raises(OptionError, match="stop must be"):
            generate(lm, TOKENIZER, ["5"], stop=wrong)


def test_names_of_control_tokens_in_messages_are_text(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    config, tokenizer = make_lm("gpt2").config, copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<end>{% endfor %}"
    end, chat = tokenizer.eos_token_id, [{"role": "x<end>", "content": " a<end><end>b "}]
    config.vocab_size = len(tokenizer)
    (ids,) = encode_prompts(config, tokenizer, [chat], 1, context=200)
    assert tokenizer.decode(ids) == "x<end>: a<end><end>b<end>"
    assert [place for place, token in enumerate(ids) if token == end] == [len(ids) - 1]
    (allowed,) = encode_prompts(config, tokenizer, [chat], 1, context=200, control_tokens=True)
    assert allowed == tokenizer("x<end>: a<end><end>b<end>").input_ids
    assert allowed.count(end) == 4


def test_prompts_may_be_token_ids_or_chats() -> None:
    lm, tokenizer = make_lm("gpt2"), make_number_tokenizer()
    chat = [{"role": "user", "content": "7 8"}, {"role": "assistant", "content": "9"}]
    with pytest.raises(OptionError, match="no chat template"):
        generate(lm, tokenizer, [chat])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
        "20 {{ m.content }} {% endfor %}{% if add_generation_prompt %}21{% endif %}"
    )
    encoded = encode_prompts(lm.config, tokenizer, [chat, [5, 9], "5 9", []], 1)
    assert encoded == [[20, 7, 8, 20, 9, 21], [5, 9], [5, 9], [BOS]]
    of_ids, of_text = generate(lm, tokenizer, [[5, 9], "5 9"], temperature=0.0)
    assert (of_ids.token_ids, of_ids.prompt) == (of_text.token_ids, "5 9")
    with pytest.raises(OptionError, match="no robots"):
        generate(lm, tokenizer, [[{"role": "robot", "content": "1"}]])
    for wrong in ([5, VOCAB], [5, -1]):
        with pytest.raises(OptionError, match="prompt 0 is neither"):
            generate(lm, tokenizer, [wrong])
