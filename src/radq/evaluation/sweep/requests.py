"""Prompts with a request for what is wanted, such as "Continue the text so that it is very positive."

    generate(lm, tokenizer, add_request(tokenizer, "Continue the text so that it is very positive.", ["The film was"]))

The base model reads a chat: the user's message holds the request, a blank line and the prompt; the assistant's message
begins with the prompt, and the base model goes on with it. A base model without a chat template reads the user's
message alone, as plain text.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from radq.decoding.prompts import Prompt
from radq.errors import OptionError


def add_request(tokenizer: PreTrainedTokenizerBase, request: str, prompts: Sequence[str]) -> list[Prompt]:
    """Put a request before each prompt: token ids of chats, or texts where the tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return [_join(request, prompt) for prompt in prompts]
    return [_encode_chat(tokenizer, request, prompt) for prompt in prompts]


def _join(request: str, prompt: str) -> str:
    return f"{request}\n\n{prompt}"


def _encode_chat(tokenizer: PreTrainedTokenizerBase, request: str, prompt: str) -> list[int]:
    chat = [{"role": "user", "content": _join(request, prompt).rstrip()}]
    begun = bool(prompt.strip())
    if begun:
        chat.append({"role": "assistant", "content": prompt})
    try:
        text: Any = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
        )
    except Exception as error:  # templates raise errors of their own about roles and their order
        raise OptionError(f"the chat template refuses a request: {error}.", "use another base model.") from error
    return tokenizer(text, add_special_tokens=False).input_ids
