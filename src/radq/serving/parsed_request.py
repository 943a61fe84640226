"""Orders: requests after all checks, as texts with their prompts, strengths and settings."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radq.decoding.config import LogitChanges
from radq.decoding.generate import draw_uniforms
from radq.decoding.processors import Grammar, make_processors
from radq.decoding.prompt_scores import PromptScores
from radq.decoding.request import Processor
from radq.decoding.text import UNFINISHED, GrowingText, Prompt, encode_prompts, find_stops
from radq.errors import ModelError, OptionError
from radq.models.loading import num_logits
from radq.registry.config import ServeConfig
from radq.registry.problems import FieldError, check_unicode, reading
from radq.registry.strengths import MISSPELLED, SETTINGS, Guidance
from radq.serving.bodies import ChatBody, CompletionBody, Message, ResponseFormat, TextBody, find_ignored
from radq.serving.served import Served
from radq.serving.texts import Text, TextUpdate


@dataclass(frozen=True)
class ParsedRequest:
    """A request in radq's terms."""

    model: str
    prompts: list[list[int]]
    echo: list[str] | None  # the texts of the prompts, where answers begin with them
    guidance: Guidance
    max_tokens: list[int]  # of a text of each prompt
    cut: bool  # whether some prompt has room for fewer tokens than were asked for
    n: int
    seed: int
    stop: tuple[str, ...]
    stop_tokens: frozenset[int]
    changes: LogitChanges
    grammar: Grammar | None
    logprobs: int | None  # the number of alternatives that are told about each token; None tells nothing
    token_ids: bool
    stream: bool
    usage: bool
    ignored: list[str]

    @property
    def num_texts(self) -> int:
        return len(self.prompts) * self.n

    def texts(self, served: Served, deliver: Callable[[TextUpdate], None], client: str = "") -> list[Text]:
        """Make the texts to decode: the samples of each prompt together, with the random numbers of `radq.generate`."""
        uniforms = draw_uniforms(self.seed, 0, len(self.prompts), self.n, max(self.max_tokens))
        processors = [make_processors(self.changes, len(prompt), self.stop_tokens) for prompt in self.prompts]
        selection = served.loaded.select(self.guidance.strengths)
        return [
            Text(
                index=p * self.n + s,
                prompt=prompt,
                steering=self.guidance.steering,
                selection=selection,
                max_tokens=self.max_tokens[p],
                uniforms=uniforms[p, s, : self.max_tokens[p]],
                stops=self.stop_tokens,
                growing=GrowingText(served.tokenizer, prompt, self.stop, self.changes.min_new_tokens),
                deliver=deliver,
                parsed=self,
                client=client,
                details=self.guidance.details or bool(self.logprobs),
                tells_stop=self.echo is not None and self.logprobs is not None,
                processors=(*self._masks(prompt), *processors[p]),
            )
            for p, prompt in enumerate(self.prompts)
            for s in range(self.n)
        ]

    def prompt_scores(self, served: Served) -> PromptScores | None:
        """Prepare the log-probabilities of the tokens of prompts, where the answer tells them."""
        if self.echo is None or self.logprobs is None:
            return None
        guide, strengths = served.loaded.sum(self.guidance.strengths)
        settings = self.guidance.steering, strengths, self.stop_tokens, self.logprobs
        return PromptScores(served.lm, guide, self.prompts, *settings)

    def _masks(self, prompt: list[int]) -> tuple[Processor, ...]:
        return () if self.grammar is None else (self.grammar.mask(len(prompt), self.stop_tokens),)


def parse_request(body: CompletionBody | ChatBody, served: Served) -> ParsedRequest:
    """Check a body and turn it into a parsed request; refuse a body that asks for something that cannot be done."""
    check_unicode(body.model_dump())
    config = served.config
    _refuse_misspelled(body, config)
    ignored = find_ignored(body)
    model, asked, notes = _read_steering(body, config)
    with reading("prompt" if isinstance(body, CompletionBody) else "messages"):
        prompts = _read_prompts(body, served)
    echo = _read_echo(body, prompts, served)
    asked_tokens = _asked_tokens(body)
    if asked_tokens == 0 and echo is None:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise FieldError(name, f"{name} must be at least 1, got 0.", "0 is for echo, which tells prompts.")
    max_tokens = _find_max_tokens(asked_tokens, prompts, served)
    n = body.n or 1
    if len(prompts) * n > config.limits.choices:
        raise FieldError(
            "n",
            f"a request may ask for at most {config.limits.choices} texts, got {len(prompts)} prompts times {n}.",
            "send several requests.",
        )
    stop_tokens = _find_stop_tokens(body, served)
    changes = _read_changes(body, num_logits(served.lm))
    temperature = 1.0 if body.temperature is None else body.temperature
    guidance = config.guidance(asked, temperature, None if body.top_p == 1 else body.top_p, notes)
    logprobs = _count_logprobs(body)
    if guidance.details and logprobs is None:
        raise FieldError("radq", "radq tells details together with logprobs alone.", "ask for logprobs too.")
    return ParsedRequest(
        model=model,
        prompts=prompts,
        echo=echo,
        guidance=guidance,
        max_tokens=max_tokens,
        cut=asked_tokens is not None and min(max_tokens) < asked_tokens,
        n=n,
        seed=secrets.randbits(32) if body.seed is None else body.seed,
        stop=_read_stops(body.stop, config.limits.stops),
        stop_tokens=stop_tokens,
        changes=changes,
        grammar=_read_grammar(changes, stop_tokens, served),
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        stream=bool(body.stream),
        usage=body.stream_options is not None and body.stream_options.include_usage,
        ignored=ignored,
    )


def _refuse_misspelled(body: TextBody, config: ServeConfig) -> None:
    """Refuse unknown fields that look like steering."""
    for name in body.model_extra or {}:
        if "radq" in name.lower() or name in (*config.guides, *SETTINGS, *MISSPELLED):
            raise FieldError(
                name[:60],
                f"{ascii(name)[:60]} is no field of a request.",
                'write strengths as "radq": {"sentiment": 20}.',
            )


def _read_steering(body: TextBody, config: ServeConfig) -> tuple[str, dict[str, float | None], list[str]]:
    """Read the name of the model, and all strengths and settings: those of the request replace those of the model.

    The third result are notes about numbers that may have been meant otherwise.
    """
    model = body.model or config.base_id
    own = config.model_strengths(model)
    with reading("radq" if body.radq is not None or body.vllm_xargs is None else "vllm_xargs"):
        given = _find_steering(body)
        asked = {} if given is None else config.read_strengths(given)
        config.check_strengths(asked)
        notes = [] if given is None else config.note_shares(given)
    if body.top_k is not None:
        asked["top_k"] = float(body.top_k)
        with reading("top_k"):
            config.check_strengths({"top_k": asked["top_k"]})
    return model, {**own, **asked}, notes


def _find_steering(body: TextBody) -> Any:
    """Find the strengths of a request in `radq`, or where requests to vLLM have it."""
    arguments = body.vllm_xargs or {}
    if others := sorted(arguments.keys() - {"radq"}):
        raise OptionError(
            f"vllm_xargs must have no other field than radq here, got {ascii(others[0])[:60]}.",
            'write "vllm_xargs": {"radq": "sentiment=20"}.',
        )
    if arguments and body.radq is not None:
        raise OptionError("radq stands twice in the request.", "leave vllm_xargs out.")
    return arguments.get("radq", body.radq)


def _read_prompts(body: CompletionBody | ChatBody, served: Served) -> list[list[int]]:
    """Read the tokens of the prompts, behind each of which there is room for a token, if one is asked for."""
    room = 0 if _asked_tokens(body) == 0 else 1
    limits = served.config.limits
    given: Sequence[Prompt] = _prompts(body)
    if len(given) > limits.choices:
        raise OptionError(f"a request may have at most {limits.choices} prompts.", "send several requests.")
    return encode_prompts(
        served.lm.config,
        served.tokenizer,
        given,
        room,
        served.context,
        limits.prompt_tokens,
        served.config.control_tokens,
    )


def _asked_tokens(body: TextBody) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _read_echo(body: CompletionBody | ChatBody, prompts: list[list[int]], served: Served) -> list[str] | None:
    if isinstance(body, ChatBody) or not body.echo:
        return None
    pairs = zip(_prompts(body), prompts, strict=True)
    return [
        prompt
        if isinstance(prompt, str)
        else str(served.tokenizer.decode(ids, skip_special_tokens=True)).rstrip(UNFINISHED)
        for prompt, ids in pairs
    ]


def _find_max_tokens(asked: int | None, prompts: list[list[int]], served: Served) -> list[int]:
    """Find the most tokens of a text of each prompt: no more than the operator allows, and than there is room for."""
    most = served.config.defaults.max_tokens if asked is None else asked
    limit = served.config.limits.max_tokens
    return [min(limit if most is None else most, limit, served.context - len(prompt)) for prompt in prompts]


def _prompts(body: CompletionBody | ChatBody) -> list[Any]:
    if isinstance(body, ChatBody):
        return [[{"role": message.role, "content": _content(message)} for message in body.messages]]
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise OptionError("there is no prompt.", "give a text, or a list of texts.")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def _content(message: Message) -> str:
    if isinstance(message.content, list):
        if any(part.type != "text" or part.text is None for part in message.content):
            raise OptionError("messages can hold texts alone.", "leave images and sounds out.")
        return "".join(part.text or "" for part in message.content)
    return message.content or ""


def _read_stops(stop: str | list[str] | None, most: int) -> tuple[str, ...]:
    """Read stop texts; empty ones, which some clients send in place of none, stop nothing."""
    stops = [one for one in ([stop] if isinstance(stop, str) else stop or []) if one]
    if len(stops) > most or any(len(one) > 256 for one in stops):
        raise FieldError(
            "stop",
            f"stop must be at most {most} texts of up to 256 characters, got {len(stops)}.",
            "give fewer or shorter ones.",
        )
    return tuple(stops)


def _find_stop_tokens(body: TextBody, served: Served) -> frozenset[int]:
    """Find the tokens that end a text: the model's, unless they are to be ignored, and those of the request."""
    own = body.stop_token_ids or []
    most, size = served.config.limits.stops, num_logits(served.lm)
    if len(own) > most or any(token >= size for token in own):
        raise FieldError(
            "stop_token_ids", f"stop_token_ids must be at most {most} numbers below {size}.", "give numbers of tokens."
        )
    return frozenset([*own, *([] if body.ignore_eos else find_stops(served.lm, served.tokenizer, None))])


def _read_changes(body: TextBody, vocab_size: int) -> LogitChanges:
    with reading("logit_bias"):
        bias = {_read_token(token): number for token, number in (body.logit_bias or {}).items()}
        changes = LogitChanges(
            min_new_tokens=body.min_tokens or 0,
            logit_bias=bias,
            repetition_penalty=body.repetition_penalty or 1.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            min_p=body.min_p or 0.0,
            json_schema=_read_schema(body.response_format),
        )
        changes.check_tokens(vocab_size)
    return changes


def _read_schema(form: ResponseFormat | None) -> Mapping[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        raise FieldError("response_format", "response_format has no json_schema.", 'add {"schema": {…}}.')
    return form.json_schema.schema_


def _read_grammar(changes: LogitChanges, stop_tokens: frozenset[int], served: Served) -> Grammar | None:
    """Compile the grammar of a request; a missing package is an error of the request, too."""
    if changes.json_schema is None:
        return None
    if not stop_tokens:
        raise FieldError("ignore_eos", "a text that is JSON must be able to end.", "leave ignore_eos out.")
    try:
        return Grammar(served.tokenizer, num_logits(served.lm), changes.json_schema)
    except (OptionError, ModelError) as error:
        raise FieldError("response_format", error.message, error.hint) from error


def _read_token(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 12):
        raise OptionError(f"logit_bias must name tokens by their numbers, got {ascii(name)[:60]}.", "give numbers.")
    return int(name)


def _count_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """Read how many alternatives are told about each token; None if nothing is told."""
    top = body.top_logprobs
    if isinstance(body, CompletionBody):
        return body.logprobs if top is None else max(top, body.logprobs or 0)
    if top and not body.logprobs:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs.", 'add "logprobs": true.')
    return top or 0 if body.logprobs else None
