"""Chat messages as texts: contexts and answers put together are what the template writes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from radq.data.examples import read_chat, render_chats
from radq.errors import DataError
from radq.toy import make_tokenizer

PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# a template that writes what an assistant said before otherwise than what it says last
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content if loop.last or m.role == 'user' else '…' }}\n{% endfor %}"
)

roles = st.sampled_from(["user", "assistant"])
message = st.builds(lambda role, content: {"role": role, "content": content}, roles, st.sampled_from(["a", "b", "c d"]))
chat = st.lists(message, min_size=1, max_size=3)


def make(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@given(st.lists(message, max_size=2), st.lists(chat, min_size=2, max_size=3), st.booleans(), st.booleans())
def test_context_and_answer_are_the_whole_chat(
    prompt: list[Any], answers: list[Any], repeats: bool, forgetful: bool
) -> None:
    tokenizer = make(FORGETFUL if forgetful else PLAIN)
    given_answers = [prompt + answer for answer in answers] if repeats else answers
    context, texts = render_chats(tokenizer, prompt, given_answers)
    for answer, text in zip(answers, texts, strict=True):
        whole = [answer, answer[len(prompt) :]][not repeats and answer[: len(prompt)] == prompt]
        assert context + text == tokenizer.apply_chat_template(prompt + whole, tokenize=False)


def test_messages_in_common_belong_to_the_context() -> None:
    tokenizer = make(PLAIN)
    question = {"role": "user", "content": "how was it"}
    answers = [[question, {"role": "assistant", "content": word}] for word in ("good", "bad")]
    expected = ("<user> how was it\n<assistant>", [" good\n", " bad\n"])
    assert render_chats(tokenizer, [], answers) == expected
    assert render_chats(tokenizer, [question], answers) == expected  # which repeat the prompt
    assert render_chats(tokenizer, [question], [answer[1:] for answer in answers]) == expected


def test_texts_among_messages_have_a_role() -> None:
    assert read_chat("hello ", "user") == [{"role": "user", "content": "hello"}]
    assert read_chat(None, "user") == []


def test_mistakes_are_named() -> None:
    answers = [[{"role": "assistant", "content": word}] for word in ("good", "bad")]
    with pytest.raises(DataError, match="no chat template"):
        render_chats(make(None), [], answers)
    with pytest.raises(DataError, match="refuses these messages: .*no assistants"):
        render_chats(make("{{ raise_exception('no assistants') }}"), [], answers)
    with pytest.raises(DataError, match="content of a message must be a text, got None"):
        read_chat([{"role": "user", "content": None}], "user")
