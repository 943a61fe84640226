"""The bodies of requests, as OpenAI's clients send them, with radq's own fields."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _refuse_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("boolean", "Input should be a number, and not true or false")
    return value


NoBoolean = BeforeValidator(_refuse_boolean)
Number = Annotated[float, NoBoolean, Field(allow_inf_nan=False)]
Whole = Annotated[int, NoBoolean, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, NoBoolean, Field(ge=0, lt=2**31)]
Token = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]  # a strict number needs no Python of its own
Tokens = Annotated[
    list[Token], Field(fail_fast=True)
]  # a body has room for half a million, each of which might be wrong
Texts = Annotated[list[str], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="Changes nothing here.")


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = Field(None, description="Changes nothing here, as do the next two.")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class TextBody(BaseModel):
    """The fields that completions and chat completions have in common; see `radq.serving.fields` for all others."""

    model_config = ConfigDict(extra="allow")

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


class CompletionBody(TextBody):
    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)] = Field(
        description="One or more texts, or lists of token ids."
    )
    logprobs: Annotated[Count, Field(le=20)] | None = None
    echo: bool | None = Field(None, description="Whether the answer begins with the prompt.")


class Part(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part] | None = None


class ChatBody(TextBody):
    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None


Kind = Literal["completion", "chat"]
