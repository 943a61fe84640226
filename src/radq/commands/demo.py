"""radq demo: show texts of a small language model with and without steering."""

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from radq.models.calibration import shipped_calibrations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table
    from rich.text import Text as Coloured
    from transformers import PreTrainedTokenizerBase

    from radq.evaluation.demonstration import Demonstration, DemoText


def _describe_defaults(name: str) -> str:
    weak, medium, strong = (f"{beta:g}" for beta in shipped_calibrations()[name].named.values())
    return f"the defaults are weak, medium and strong, which are {weak}, {medium} and {strong}"


@dataclass
class Arguments:
    """Show a small language model, SmolLM2-135M-Instruct, with and without steering: towards positive sentiment, and
    away from toxicity, at several strengths β."""

    prompt: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = field(default_factory=list)
    """Text to continue, in place of the demo's own prompts; repeat the option for more texts."""
    sentiment_betas: Annotated[
        list[float],
        tyro.conf.arg(help=f"Strengths β that steer towards positive sentiment; {_describe_defaults('sentiment')}."),
    ] = field(default_factory=list)
    toxicity_betas: Annotated[
        list[float],
        tyro.conf.arg(
            help=f"Strengths β of toxicity, negative to steer away from it; {_describe_defaults('toxicity')}."
        ),
    ] = field(default_factory=list)
    samples: int = 8
    """Number of continuations of each prompt. The first one is shown; means are over all of them."""
    seed: int = 0
    """Seed of the random numbers: the same seed gives the same texts."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    json: bool = False
    """Print all texts, rewards and means as JSON."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce, print_json
    from radq.decoding.config import check_counts
    from radq.sources.embedded import find_embedded

    check_counts(samples=arguments.samples)
    find_embedded()
    announce("loading SmolLM2-135M-Instruct; the first time it is converted, in a quarter of a minute", arguments.json)
    from radq.evaluation.demonstration import ATTRIBUTES, NUM_TOKENS, compare, load_demo_models
    from radq.models.loading import find_device
    from radq.numerics import require_memory_for_texts

    num_texts = max(len(arguments.prompt), 1) * arguments.samples
    require_memory_for_texts(num_texts, NUM_TOKENS, "give a smaller --samples.")
    betas = {"sentiment": arguments.sentiment_betas, "toxicity": arguments.toxicity_betas}
    models = load_demo_models(device=find_device(arguments.device))
    documents = []
    for name, attribute in ATTRIBUTES.items():
        options = (arguments.samples, arguments.seed, not arguments.json)
        comparison = compare(models, attribute, arguments.prompt, betas[name], *options)
        if arguments.json:
            documents.append(_document(comparison, models.tokenizer))
        else:
            _print_comparison(comparison, models.tokenizer)
    if arguments.json:
        print_json({"base": "embedded", "seed": arguments.seed, "attributes": documents, "next": _next_commands()})
    else:
        _print_next_commands()


# --- how to go on ---


def _program() -> str:
    """The name to call this program by: radq, or its path as it was called if PATH does not lead to it."""
    called, found = Path(sys.argv[0]), shutil.which("radq")
    if called.name != "radq" or (found is not None and Path(found).resolve() == called.resolve()):
        return "radq"
    return sys.argv[0]


def _next_commands() -> dict[str, str]:
    """Commands to try next, by what they do."""
    from radq.evaluation.demonstration import ATTRIBUTES

    steer = f"embedded:sentiment={ATTRIBUTES['sentiment'].default_beta:g}"
    return {
        "your own prompt": f'{_program()} generate --prompt "My neighbour" --guide {steer}',
        "your own csv with columns text and praise": (
            f"{_program()} train --data reviews.csv --labels praise --backbone embedded --out praise"
        ),
        "its reward model": f'{_program()} generate --prompt "My neighbour" --guide praise:praise=35',
    }


def _print_next_commands() -> None:
    print("Try next:")
    for purpose, command in _next_commands().items():
        print(f"  {command}   # {purpose}")
    activate = Path(sys.argv[0]).with_name("activate")
    if _program() != "radq" and activate.is_file():
        print(f"After `source {activate}` you can type radq alone.")


# --- tables for people ---


def _print_comparison(comparison: "Demonstration", tokenizer: "PreTrainedTokenizerBase") -> None:
    from radq.commands.console import console

    screen, name = console(), comparison.attribute.name
    steers = "away from it" if comparison.attribute.default_beta < 0 else "towards it"
    screen.rule(f"[bold]{name}[/]: β steers {steers}", align="left")
    for part in (*_text_tables(comparison, tokenizer), _mean_table(comparison)):
        screen.print(part)
        screen.print()


def _text_tables(comparison: "Demonstration", tokenizer: "PreTrainedTokenizerBase") -> "Iterator[Table]":
    """Make a table for each prompt, with its first sample unguided and at each β."""
    from rich.table import Table
    from rich.text import Text

    unguided = comparison.cells[0]
    for row in range(0, len(unguided.texts), comparison.num_samples):
        prompt = unguided.texts[row].generation.prompt
        table = Table(box=None, padding=(0, 2, 0, 0), title=Text(prompt, style="bold"), title_justify="left")
        table.add_column("", no_wrap=True)
        table.add_column("judge", justify="right", no_wrap=True)
        table.add_column("continuation", overflow="fold")
        for cell in comparison.cells:
            text = cell.texts[row]
            table.add_row(
                _describe_beta(comparison, cell.beta), _format_score(text.score), _coloured(comparison, text, tokenizer)
            )
        yield table


def _coloured(comparison: "Demonstration", text: "DemoText", tokenizer: "PreTrainedTokenizerBase") -> "Coloured":
    """Colour each token by its reward: blue for a low one, orange for a high one.

    Most text is not toxic, so a low reward of toxicity has no colour.
    """
    from radq.report.tokens import coloured, split_tokens

    pieces = [piece.replace("\n", "↵") for piece in split_tokens(tokenizer, text.generation.token_ids)]
    pieces[0] = pieces[0].lstrip(" ")
    low = -1 if comparison.attribute.default_beta < 0 else 0
    return coloured(zip(pieces, text.rewards, strict=True), low, 1)


def _mean_table(comparison: "Demonstration") -> "Table":
    from rich.table import Table

    unguided = comparison.cells[0]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"means of {len(unguided.texts)} texts", no_wrap=True)
    for column in ("judge", "perplexity", "ms per token"):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in comparison.cells:
        table.add_row(
            _describe_beta(comparison, cell.beta),
            _format_score(cell.score),
            _with_ratio(cell.perplexity, unguided.perplexity),
            _with_ratio(cell.milliseconds, unguided.milliseconds),
        )
    return table


def _describe_beta(comparison: "Demonstration", beta: float | None) -> str:
    if beta is None:
        return "unguided"
    return f"β = {beta:g}" + (" (default)" if beta == comparison.attribute.default_beta else "")


def _format_score(score: float | None) -> str:
    return "blank" if score is None else f"{score:.2f}"


def _with_ratio(value: float, unguided: float) -> str:
    return f"{value:.1f} (×{value / unguided:.2f})"


# --- JSON for programs ---


def _document(comparison: "Demonstration", tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    cells = [
        {
            "beta": cell.beta,
            "score": cell.score,
            "perplexity": cell.perplexity,
            "perplexity_ratio": cell.perplexity / comparison.cells[0].perplexity,
            "ms_per_token": cell.milliseconds,
            "texts": [_text_document(text, tokenizer) for text in cell.texts],
        }
        for cell in comparison.cells
    ]
    attribute = comparison.attribute
    return {
        "attribute": attribute.name,
        "default_beta": attribute.default_beta,
        "judge": comparison.judge,
        "cells": cells,
    }


def _text_document(text: "DemoText", tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    from radq.report.tokens import split_tokens

    pieces = split_tokens(tokenizer, text.generation.token_ids)
    tokens = [{"token": piece, "reward": reward} for piece, reward in zip(pieces, text.rewards, strict=True)]
    return {
        "prompt": text.generation.prompt,
        "text": text.generation.text,
        "score": text.score,
        "tokens": tokens,
    }
