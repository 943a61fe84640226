"""The fields of requests: each is honoured, refused by its name, or changes no text.

Honoured fields are those of the bodies. A refused field would change the text in a way that the server cannot; it may
be sent with a value that changes nothing. What stands nowhere is named in the answer under `ignored`, unless it looks
like steering. The list of docs/serving.md is made from this table.
"""

from collections.abc import Sequence
from typing import Any, get_args

from radq.registry.problems import FieldError
from radq.serving.bodies import ChatBody, CompletionBody, Kind, Message

BODIES: dict[Kind, type[CompletionBody | ChatBody]] = {"completion": CompletionBody, "chat": ChatBody}

# Refused fields and the values that, beside null, change nothing. Fields of the other route are refused, too.
REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "best_of": (1,),  # and any number that equals n
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (0, 1),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # of other servers: llama.cpp, TGI, SGLang, Ollama, text-generation-webui
    "cfg_scale": (1,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "format": ("",),
    "grammar": ("",),
    "guidance_scale": (1,),
    "json_schema": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "n_predict": (),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_predict": (),
    "penalty_alpha": (0,),
    "regex": (),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
REFUSED_OF_MESSAGES = ("audio", "function_call", "tool_calls")  # fields of messages; others are named under `ignored`
HINTS = dict.fromkeys(("format", "guided_json", "json_schema", "structured_outputs"), "write response_format.") | {
    "max_new_tokens": "write max_tokens.",
    "n_predict": "write max_tokens.",
    "num_predict": "write max_tokens.",
    "min_new_tokens": "write min_tokens.",
    "repeat_penalty": "write repetition_penalty.",
    "messages": "send it to /v1/chat/completions.",
    "prompt": "send it to /v1/completions.",
}

# Fields that change no text, with any value.
HARMLESS = {
    "cache_prompt",
    "cache_salt",
    "include_reasoning",
    "keep_alive",
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}


def honoured(kind: Kind) -> list[str]:
    return sorted(BODIES[kind].model_fields)


def refused(kind: Kind) -> dict[str, tuple[Any, ...]]:
    """Return the fields that a route refuses, with the values that change nothing."""
    own = BODIES[kind].model_fields
    others = {name for other in get_args(Kind) for name in BODIES[other].model_fields}
    names = dict.fromkeys(sorted(others), ()) | REFUSED
    return {name: values for name, values in names.items() if name not in own}


def find_ignored(body: CompletionBody | ChatBody) -> list[str]:
    """Refuse fields that would change the text; return the names of those that nobody knows."""
    unknown = body.model_extra or {}
    table = refused("completion" if isinstance(body, CompletionBody) else "chat")
    for name, value in unknown.items():
        nothing = table.get(name)
        if nothing is None or value is None:
            continue
        if name == "best_of":
            nothing = (body.n or 1,)
        if not any(same(value, one) for one in nothing):
            raise FieldError(name, f"this server does not support {name}.", HINTS.get(name, f"leave {name} out."))
    of_messages = _find_ignored_of_messages(body.messages) if isinstance(body, ChatBody) else set()
    return sorted(set(unknown) - HARMLESS - set(table) | of_messages)


def _find_ignored_of_messages(messages: Sequence[Message]) -> set[str]:
    found: set[str] = set()
    for number, message in enumerate(messages):
        for name, value in (message.model_extra or {}).items():
            if name in REFUSED_OF_MESSAGES and value not in (None, []):
                place = f"messages.{number}.{name}"
                raise FieldError(place, f"this server does not support {place}.", f"leave {name} out.")
            if value is not None:
                found.add(f"messages.{name}")
    return found


def same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)
