"""Requests after all checks, with their prompts, strengths and settings, and the texts that they ask for."""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from radq.decoding.config import LogitChanges
from radq.decoding.generate import draw_uniforms
from radq.decoding.processors import GrammarMask, Matcher, compile_grammar, make_processors
from radq.decoding.prompt_scores import PromptScores
from radq.decoding.request import Processor, Request, Ticket
from radq.decoding.text import UNFINISHED, GrowingText, encode_prompts, find_stops
from radq.errors import ModelError, OptionError
from radq.models.loading import num_logits
from radq.registry.config import ServeConfig
from radq.registry.details import CandidateRow, DrawnToken, StepNumbers
from radq.registry.loaded_guides import Served
from radq.registry.problems import FieldError, check_unicode, reading
from radq.registry.strengths import MISSPELLED, SETTINGS, Guidance
from radq.serving.bodies import ChatBody, CompletionBody, ResponseFormat, TextBody, find_ignored

SAME_NAME = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")  # as in LogitChanges


@dataclass(frozen=True, eq=False)
class ParsedRequest:
    """A request in radq's terms."""

    body: CompletionBody | ChatBody
    model: str
    prompts: list[list[int]]
    echo: list[str] | None  # the texts of the prompts, where answers begin with them
    guidance: Guidance
    max_tokens: list[int]  # of a text of each prompt
    seed: int
    stop: tuple[str, ...]
    stop_tokens: frozenset[int]
    changes: LogitChanges
    grammar: Matcher | None
    logprobs: int | None  # the number of alternatives that are told about each token; None tells nothing
    ignored: list[str]

    @property
    def n(self) -> int:
        return self.body.n or 1

    @property
    def cut(self) -> bool:
        """Whether some prompt has room for fewer tokens than were asked for."""
        return self.body.asked_tokens is not None and min(self.max_tokens) < self.body.asked_tokens

    @property
    def details(self) -> bool:
        """Whether candidates of tokens are told."""
        return self.guidance.details or bool(self.logprobs)

    @property
    def tells_prompts(self) -> bool:
        """Whether log-probabilities are told of the tokens of prompts, and of stop tokens, which have no text."""
        return self.echo is not None and self.logprobs is not None

    def texts(self, served: Served, deliver: "Callable[[TextUpdate], None]", client: str) -> "list[ServedText]":
        """Make the texts to decode: the samples of each prompt together, with the random numbers of `radq.generate`."""
        uniforms = draw_uniforms(self.seed, 0, len(self.prompts), self.n, max(self.max_tokens))
        selection = served.loaded.select(self.guidance.strengths)
        texts = []
        for p, s in product(range(len(self.prompts)), range(self.n)):
            prompt, most = self.prompts[p], self.max_tokens[p]
            request = Request(
                prompt,
                self.guidance.steering,
                most,
                uniforms[p, s, :most],
                selection.strengths,
                self.stop_tokens,
                processors=self._processors(prompt),
                guides=selection.guides,
                details=self.details,
            )
            growing = GrowingText(served.tokenizer, prompt, self.stop, self.changes.min_new_tokens)
            texts.append(ServedText(len(texts), self, client, request, selection.places, growing, deliver))
        return texts

    def _processors(self, prompt: list[int]) -> tuple[Processor, ...]:
        mask = () if self.grammar is None else (GrammarMask(self.grammar, len(prompt), self.stop_tokens),)
        return (*mask, *make_processors(self.changes, len(prompt), self.stop_tokens))

    def prompt_scores(self, served: Served) -> PromptScores | None:
        """Prepare the log-probabilities of the tokens of prompts, where the answer tells them."""
        if not self.tells_prompts:
            return None
        guide, strengths = served.loaded.sum(self.guidance.strengths)
        settings = self.guidance.steering, strengths, self.stop_tokens, self.logprobs or 0
        return PromptScores(served.lm, guide, self.prompts, *settings)


@dataclass(frozen=True)
class TextUpdate:
    """An update with new tokens of a text, or of its end."""

    text: "ServedText"
    tokens: list[DrawnToken]
    rest: str = ""  # what becomes final at the end of the text
    finish_reason: str | None = None
    error: str | None = None


@dataclass(eq=False)
class ServedText:
    """A text that a request asks for, on its way through the engine."""

    index: int  # among the texts of its request
    parsed: ParsedRequest
    client: str  # who sent the request: clients take turns
    request: Request
    places: Mapping[str, int]  # of each name of a guide among the strengths
    growing: GrowingText
    deliver: Callable[[TextUpdate], None]
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    drawn: list[DrawnToken] = field(default_factory=list)
    count: int = 0  # tokens, with a stop token
    _pieces: list[str] = field(default_factory=list)
    _told: list[CandidateRow] = field(default_factory=list)  # of each token, where the request has details

    def __post_init__(self) -> None:
        self.request = replace(self.request, watch=self._watch)

    def _watch(self, token: int) -> bool:
        """Add a token to the text; return whether the text ends at a stop string."""
        self._pieces.append(self.growing.add(token))
        return self.growing.stopped

    def take(self, ticket: Ticket) -> list[DrawnToken]:
        """Take the tokens that have come since the last call; a stop token is not one of them, unless it is told."""
        if self.parsed.tells_prompts and ticket.finish_reason == "stop" and len(self._pieces) < len(ticket.rows):
            self._pieces.append("")
        fresh = []
        for position in range(len(self.drawn), len(self._pieces)):
            token, shift, kl, _, base, guided, _, *told = ticket.rows[position].tolist()
            rewards = {name: told[column] for name, column in self.places.items()} if told else None
            candidates = self._told[position] if position < len(self._told) else None
            fresh.append(DrawnToken(int(token), self._pieces[position], shift, kl, base, guided, rewards, candidates))
        self.drawn += fresh
        self.count = max(self.count, len(ticket.rows))
        return fresh

    def tell(self, ticket: Ticket, row: int, chosen: int, numbers: StepNumbers) -> None:
        """Note the candidates of a token, unless the text has ended before it."""
        if len(self._told) < len(ticket.rows):
            candidates = numbers.row(row, self.places)
            self._told.append(candidates.take(candidates.select(chosen)))


def parse_request(body: CompletionBody | ChatBody, served: Served) -> ParsedRequest:
    """Check a body and turn it into a parsed request; refuse a body that asks for something that cannot be done."""
    check_unicode(body.model_dump())
    config = served.config
    _refuse_misspelled(body, config)
    ignored = find_ignored(body)
    model, asked, notes = _read_steering(body, config)
    with reading(body.prompt_field):
        prompts = _read_prompts(body, served)
    echo = _read_echo(body, prompts, served)
    if body.asked_tokens == 0 and echo is None:
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise FieldError(name, f"{name} must be at least 1, got 0.", "0 is for echo, which tells prompts.")
    most, n = config.limits.choices, body.n or 1
    if len(prompts) * n > most:
        reason = f"a request may ask for at most {most} texts, got {len(prompts)} prompts times {n}."
        raise FieldError("n", reason, "send several requests.")
    stop_tokens = _find_stop_tokens(body, served)
    changes = _read_changes(body, num_logits(served.lm))
    temperature = 1.0 if body.temperature is None else body.temperature
    guidance = config.guidance(asked, temperature, None if body.top_p == 1 else body.top_p, notes)
    logprobs = body.count_logprobs()
    if guidance.details and logprobs is None:
        raise FieldError("radq", "radq tells details together with logprobs alone.", "ask for logprobs too.")
    return ParsedRequest(
        body=body,
        model=model,
        prompts=prompts,
        echo=echo,
        guidance=guidance,
        max_tokens=_find_max_tokens(body.asked_tokens, prompts, served),
        seed=secrets.randbits(32) if body.seed is None else body.seed,
        stop=_read_stops(body.stop, config.limits.stops),
        stop_tokens=stop_tokens,
        changes=changes,
        grammar=_read_grammar(changes, stop_tokens, served),
        logprobs=logprobs,
        ignored=ignored,
    )


def _refuse_misspelled(body: TextBody, config: ServeConfig) -> None:
    """Refuse unknown fields that look like steering."""
    for name in body.model_extra or {}:
        if "radq" in name.lower() or name in (*config.guides, *SETTINGS, *MISSPELLED):
            reason = f"{ascii(name)[:60]} is no field of a request."
            raise FieldError(name[:60], reason, 'write strengths as "radq": {"sentiment": 20}.')


def _read_steering(body: TextBody, config: ServeConfig) -> tuple[str, dict[str, float | None], list[str]]:
    """Read the name of the model, and all strengths and settings: those of the request replace those of the model.

    The third result are notes about numbers that may have been meant otherwise.
    """
    model = body.model or config.base_id
    own = config.model_strengths(model)
    with reading("radq" if body.radq is not None or body.vllm_xargs is None else "vllm_xargs"):
        given = _find_steering(body)
        asked = {} if given is None else config.read_strengths(given)
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
    room, limits, prompts = int(body.asked_tokens != 0), served.config.limits, body.prompts()
    if len(prompts) > limits.choices:
        raise OptionError(f"a request may have at most {limits.choices} prompts.", "send several requests.")
    lengths = room, served.context, limits.prompt_tokens
    return encode_prompts(served.lm.config, served.tokenizer, prompts, *lengths, served.config.control_tokens)


def _read_echo(body: CompletionBody | ChatBody, prompts: list[list[int]], served: Served) -> list[str] | None:
    if isinstance(body, ChatBody) or not body.echo:
        return None
    decode = served.tokenizer.decode
    return [
        prompt if isinstance(prompt, str) else str(decode(ids, skip_special_tokens=True)).rstrip(UNFINISHED)
        for prompt, ids in zip(body.prompts(), prompts, strict=True)
    ]


def _find_max_tokens(asked: int | None, prompts: list[list[int]], served: Served) -> list[int]:
    """Find the most tokens of a text of each prompt: no more than the operator allows, and than there is room for."""
    most = served.config.defaults.max_tokens if asked is None else asked
    limit = served.config.limits.max_tokens
    return [min(limit if most is None else most, limit, served.context - len(prompt)) for prompt in prompts]


def _read_stops(stop: str | list[str] | None, most: int) -> tuple[str, ...]:
    """Read stop texts; empty ones, which some clients send in place of none, stop nothing."""
    stops = tuple(filter(None, [stop] if isinstance(stop, str) else stop or []))
    if len(stops) > most or any(len(text) > 256 for text in stops):
        reason = f"stop must be at most {most} texts of up to 256 characters, got {len(stops)}."
        raise FieldError("stop", reason, "give fewer or shorter ones.")
    return stops


def _find_stop_tokens(body: TextBody, served: Served) -> frozenset[int]:
    """Find the tokens that end a text: the model's, unless they are to be ignored, and those of the request."""
    own = body.stop_token_ids or []
    most, size = served.config.limits.stops, num_logits(served.lm)
    if len(own) > most or any(token >= size for token in own):
        reason = f"stop_token_ids must be at most {most} numbers below {size}."
        raise FieldError("stop_token_ids", reason, "give numbers of tokens.")
    return frozenset([*own, *([] if body.ignore_eos else find_stops(served.lm, served.tokenizer, None))])


def _read_changes(body: TextBody, vocab_size: int) -> LogitChanges:
    with reading("logit_bias"):
        bias = {_read_token(token): number for token, number in (body.logit_bias or {}).items()}
        given = {name: number for name in SAME_NAME if (number := getattr(body, name)) is not None}
        schema = _read_schema(body.response_format)
        changes = LogitChanges(min_new_tokens=body.min_tokens or 0, logit_bias=bias, json_schema=schema, **given)
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


def _read_grammar(changes: LogitChanges, stop_tokens: frozenset[int], served: Served) -> Matcher | None:
    """Compile the grammar of a request; a missing package is an error of the request, too."""
    if changes.json_schema is None:
        return None
    if not stop_tokens:
        raise FieldError("ignore_eos", "a text that is JSON must be able to end.", "leave ignore_eos out.")
    try:
        return compile_grammar(served.tokenizer, num_logits(served.lm), changes.json_schema)
    except (OptionError, ModelError) as error:
        raise FieldError("response_format", error.message, error.hint) from error


def _read_token(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 12):
        raise OptionError(f"logit_bias must name tokens by their numbers, got {ascii(name)[:60]}.", "give numbers.")
    return int(name)
