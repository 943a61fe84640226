"""Chat messages as texts, by the chat template of a tokenizer.

    context, answers = render_chats(tokenizer, [{"role": "user", "content": "Hi"}], [answer, another])
    context, answer = render_answer(tokenizer, None, messages)  # of one chat, whose last message is the answer

A message is a dictionary with the texts `role` and `content`. The context is what a base model has read when it begins
to answer, so `context + answers[0]` is the whole first chat.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.errors import DataError, first_line

Message = dict[str, str]
Chat = list[Message]


def is_chat(value: Any) -> bool:
    """Whether the value of a cell is a list of messages, or should be one."""
    return isinstance(value, list | tuple | np.ndarray) and all(isinstance(item, dict) for item in value)


def read_chat(value: Any, role: str) -> Chat:
    """Read the messages of a cell; a text alone is one message of this role, and a missing or blank one is none."""
    if isinstance(value, str):
        return [{"role": role, "content": value.rstrip()}] if value.strip() else []
    if not is_chat(value):
        return []
    return [_read_message(message) for message in value]


def _read_message(message: dict[str, Any]) -> Message:
    found = {name: message.get(name) for name in ("role", "content")}
    for name, value in found.items():
        if not isinstance(value, str):
            raise DataError(f"the {name} of a message must be a text, got {value!r}.", "change or remove this row.")
    return {name: str(value) for name, value in found.items()}


def render_chats(tokenizer: PreTrainedTokenizerBase, prompt: Chat, answers: Sequence[Chat]) -> tuple[str, list[str]]:
    """Write a context and the answers to it as texts.

    Answers may repeat the messages of the prompt, and messages with which all of them begin are part of the context.
    """
    answers = [answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer for answer in answers]
    first = answers[0]
    ends = min(map(len, answers)) - 1  # each answer keeps a message
    shared = next((n for n in range(ends) if any(answer[n] != first[n] for answer in answers)), max(0, ends))
    prompt, answers = prompt + first[:shared], [answer[shared:] for answer in answers]
    whole = [_render(tokenizer, prompt + answer, False) for answer in answers]
    begins = all(answer and answer[0]["role"] == "assistant" for answer in answers)
    context = _render(tokenizer, prompt, begins) if prompt else ""
    context = _common_start([context, *whole])  # some templates write earlier answers otherwise
    return context, [text[len(context) :] for text in whole]


def render_answer(tokenizer: PreTrainedTokenizerBase, prompt: Any, cell: Any) -> tuple[str, str]:
    """Write the last message of a chat, and as its context the prompt and all messages before it.

    Both are empty if the chat does not end with an answer of the assistant.
    """
    chat = read_chat(cell, "assistant")
    if not chat or chat[-1]["role"] != "assistant" or not chat[-1]["content"].strip():
        return "", ""
    context, (answer,) = render_chats(tokenizer, read_chat(prompt, "user"), [chat])
    return context, answer.rstrip()


def _common_start(texts: list[str]) -> str:
    """The longest text with which all of these begin."""
    columns = zip(*texts, strict=False)
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, columns))


def _render(tokenizer: PreTrainedTokenizerBase, chat: Chat, add_generation_prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template for messages.", "write each cell as one text.")
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # templates raise errors of their own, about roles for example
        raise DataError(
            f"the chat template refuses these messages: {first_line(error)}.", "change or remove this row."
        ) from error
    assert isinstance(text, str)
    return text
