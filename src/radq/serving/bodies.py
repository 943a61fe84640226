"""The bodies of requests, as OpenAI's clients send them, with radq's own fields.

Each field is honoured, refused by its name, or changes no text. Honoured fields are those of the bodies. A refused
field would change the text in a way that the server cannot; it may be sent with a value that changes nothing. What
stands nowhere is named in the answer under `ignored`, unless it looks like steering. The list of docs/serving.md is
made from this table.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from radq.errors import OptionError
from radq.registry.problems import FieldError


def _refuse_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("boolean", "Input should be a number, and not true or false")
    return value


NoBoolean = BeforeValidator(_refuse_boolean)
Number = Annotated[float, NoBoolean, Field(allow_inf_nan=False)]
Whole = Annotated[int, NoBoolean, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, NoBoolean, Field(ge=0, lt=2**31)]
Token = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]  # a strict number needs no Python of its own
# A body has room for half a million tokens, each of which might be wrong.
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class ClosedModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OpenModel(BaseModel):
    model_config = ConfigDict(extra="allow")


class StreamOptions(ClosedModel):
    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="Changes nothing here.")


class Schema(ClosedModel):
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = Field(None, description="Changes nothing here, as do the next two.")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(ClosedModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class TextBody(OpenModel):
    """The fields that completions and chat completions have in common; see `radq.serving.bodies` for all others."""

    model: str | None = Field(None, description="A model of /v1/models; by default the base model.")
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = Field(None, description="The newer name of max_tokens.")
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(description="The number of candidates of each token.")] | None = None
    n: Annotated[Count, Field(ge=1)] | None = None
    stop: str | Texts | None = None
    seed: Annotated[int, NoBoolean, Field(ge=-(2**63), lt=2**64)] | None = None
    top_logprobs: Annotated[Count, Field(le=20)] | None = Field(
        None, description="The number of alternatives that are told about each token."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Field(fail_fast=True)] | None = Field(
        None, description="Tokens that end the text, beside those of the model."
    )
    response_format: ResponseFormat | None = Field(None, description="Whether the text is JSON, maybe of a schema.")
    ignore_eos: bool | None = Field(None, description="Whether the stop tokens of the model end nothing.")
    return_token_ids: bool | None = None
    radq: Annotated[
        dict[str, Any] | str | None,
        Field(
            description="Strengths of guides by name, as an object or as a text such as sentiment=20,toxicity=-50; "
            "also kl_budget, top_k and details."
        ),
    ] = None
    vllm_xargs: Annotated[
        dict[str, Any] | None, Field(description="An object with the field radq, where requests to vLLM have it.")
    ] = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(TextBody):
    prompt_field: ClassVar[str] = "prompt"

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)] = Field(
        description="One or more texts, or lists of token ids."
    )
    logprobs: Annotated[Count, Field(le=20)] | None = None
    echo: bool | None = Field(None, description="Whether the answer begins with the prompt.")

    def prompts(self) -> list[Any]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise OptionError("there is no prompt.", "give a text, or a list of texts.")
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)

    def count_logprobs(self) -> int | None:
        """Return how many alternatives are told about each token; None if nothing is told."""
        return self.logprobs if self.top_logprobs is None else max(self.top_logprobs, self.logprobs or 0)


class Part(OpenModel):
    type: str
    text: str | None = None


class Message(OpenModel):
    role: str
    content: str | list[Part] | None = None

    def text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        if any(part.type != "text" or part.text is None for part in self.content):
            raise OptionError("messages can hold texts alone.", "leave images and sounds out.")
        return "".join(part.text or "" for part in self.content)


class ChatBody(TextBody):
    prompt_field: ClassVar[str] = "messages"

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None

    def prompts(self) -> list[Any]:
        return [[{"role": message.role, "content": message.text()} for message in self.messages]]

    def count_logprobs(self) -> int | None:
        """Return how many alternatives are told about each token; None if nothing is told."""
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs.", 'add "logprobs": true.')
        return self.top_logprobs or 0 if self.logprobs else None


Kind = Literal["completion", "chat"]
BODIES: dict[Kind, type[CompletionBody | ChatBody]] = {"completion": CompletionBody, "chat": ChatBody}

# Refused fields of OpenAI, vLLM, llama.cpp, TGI, SGLang, Ollama and text-generation-webui, with the values that, beside
# null, change nothing. Fields of the other route are refused, too.
REFUSED: dict[str, tuple[Any, ...]] = {
    name: values
    for values, names in [
        (
            (),
            "audio web_search_options allowed_token_ids chat_template guided_choice guided_decoding_backend "
            "guided_grammar guided_json guided_regex guided_whitespace_pattern prompt_embeds prompt_logprobs "
            "structural_tag structured_outputs thinking_token_budget truncate_prompt_tokens ebnf json_schema "
            "max_new_tokens n_predict num_predict regex",
        ),
        (
            (True,),
            "add_generation_prompt add_special_tokens do_sample skip_special_tokens spaces_between_special_tokens",
        ),
        (
            (False,),
            "continue_final_message early_stopping include_stop_str_in_output return_tokens_as_token_ids "
            "use_beam_search",
        ),
        (([],), "bad_words documents functions logits_processors tools"),
        (({},), "chat_template_kwargs mm_processor_kwargs"),
        (("",), "format grammar negative_prompt suffix"),
        (("none", "auto"), "function_call tool_choice"),
        ((["text"],), "modalities"),
        (("none",), "reasoning_effort"),
        (("medium",), "verbosity"),
        (
            (0,),
            "dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff min_new_tokens mirostat no_repeat_ngram_size "
            "penalty_alpha top_a xtc_probability",
        ),
        ((1,), "best_of"),  # and any number that equals n
        ((1,), "cfg_scale encoder_repetition_penalty guidance_scale num_beams repeat_penalty tfs_z typical_p"),
        ((0, 1), "length_penalty"),
        ((-1, 0), "top_n_sigma"),
    ]
    for name in names.split()
}
REFUSED_OF_MESSAGES = ("audio", "function_call", "tool_calls")  # fields of messages; others are named under `ignored`
HINTS = {
    **dict.fromkeys(("format", "guided_json", "json_schema", "structured_outputs"), "write response_format."),
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict"), "write max_tokens."),
    "min_new_tokens": "write min_tokens.",
    "repeat_penalty": "write repetition_penalty.",
    "messages": "send it to /v1/chat/completions.",
    "prompt": "send it to /v1/completions.",
}

HARMLESS = (  # fields that change no text, with any value
    "cache_prompt cache_salt include_reasoning keep_alive metadata parallel_tool_calls prediction priority "
    "prompt_cache_key prompt_cache_retention request_id safety_identifier service_tier store user"
).split()


def honoured(kind: Kind) -> list[str]:
    return sorted(BODIES[kind].model_fields)


def refused(kind: Kind) -> dict[str, tuple[Any, ...]]:
    """Return the fields that a route refuses, with the values that change nothing."""
    own = BODIES[kind].model_fields
    every = sorted({name for body in BODIES.values() for name in body.model_fields})
    return {name: values for name, values in (dict.fromkeys(every, ()) | REFUSED).items() if name not in own}


def find_ignored(body: CompletionBody | ChatBody) -> list[str]:
    """Refuse fields that would change the text; return the names of those that nobody knows."""
    unknown = body.model_extra or {}
    table = refused("completion" if isinstance(body, CompletionBody) else "chat")
    for name, value in unknown.items():
        nothing = (body.n or 1,) if name == "best_of" else table.get(name, (value,))
        if value is not None and not any(same(value, one) for one in nothing):
            raise FieldError(name, f"this server does not support {name}.", HINTS.get(name, f"leave {name} out."))
    ignored = set(unknown) - {*HARMLESS, *table}
    for number, message in enumerate(body.messages if isinstance(body, ChatBody) else ()):
        for name, value in (message.model_extra or {}).items():
            if name in REFUSED_OF_MESSAGES and value not in (None, []):
                field = f"messages.{number}.{name}"
                raise FieldError(field, f"this server does not support {field}.", f"leave {name} out.")
            if value is not None:
                ignored.add(f"messages.{name}")
    return sorted(ignored)


def same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)
