"""radq demo: show texts of a small language model with and without steering."""

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text as Coloured

from radq.commands import AsJson, Device, Texts
from radq.commands.console import announce, console, print_json
from radq.models.calibration import shipped_calibrations
from radq.report.tokens import coloured, split_tokens
from radq.settings import COUNT
from radq.sources import embedded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from radq.evaluation.demonstration import Demonstration, DemoText


def _describe_defaults(name: str) -> str:
    weak, medium, strong = (f"{beta:g}" for beta in shipped_calibrations()[name].named.values())
    return f"the defaults are weak, medium and strong, which are {weak}, {medium} and {strong}"


@dataclass
class Arguments:
    """Show a small language model, SmolLM2-135M-Instruct, with and without steering: towards positive sentiment, and
    away from toxicity, at several strengths β."""

    prompt: Texts = field(default_factory=list)
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
    samples: Annotated[int, COUNT] = 8
    """Number of continuations of each prompt. The first one is shown; means are over all of them."""
    seed: int = 0
    """Seed of the random numbers: the same seed gives the same texts."""
    device: Device = "auto"
    json: AsJson = False


def run(arguments: Arguments) -> None:
    embedded.find_embedded()
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
        documents.append(_describe(comparison, models.tokenizer))
        if not arguments.json:
            _print_comparison(documents[-1], arguments.samples)
    commands = _next_commands()
    if arguments.json:
        print_json({"base": "embedded", "seed": arguments.seed, "attributes": documents, "next": commands})
        return
    print("Try next:")
    for purpose, command in commands.items():
        print(f"  {command}   # {purpose}")
    activate = Path(sys.argv[0]).with_name("activate")
    if _program() != "radq" and activate.is_file():
        print(f"After `source {activate}` you can type radq alone.")


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


# --- results ---


def _describe(comparison: "Demonstration", tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    def describe(text: "DemoText") -> dict[str, Any]:
        generation = text.generation
        pieces = zip(split_tokens(tokenizer, generation.token_ids), text.rewards, strict=True)
        tokens = [{"token": piece, "reward": reward} for piece, reward in pieces]
        return {"prompt": generation.prompt, "text": generation.text, "score": text.score, "tokens": tokens}

    cells = [
        {
            "beta": cell.beta,
            "score": cell.score,
            "perplexity": cell.perplexity,
            "perplexity_ratio": cell.perplexity / comparison.cells[0].perplexity,
            "ms_per_token": cell.milliseconds,
            "texts": [describe(text) for text in cell.texts],
        }
        for cell in comparison.cells
    ]
    attribute = comparison.attribute
    beta = attribute.default_beta
    return {"attribute": attribute.name, "default_beta": beta, "judge": comparison.judge, "cells": cells}


def _print_comparison(document: dict[str, Any], samples: int) -> None:
    """Print the first sample of each prompt, unguided and at each β, and means over all samples."""
    screen, default, cells = console(), document["default_beta"], document["cells"]
    steers = "away from it" if default < 0 else "towards it"
    screen.rule(f"[bold]{document['attribute']}[/]: β steers {steers}", align="left")
    betas = ["unguided", *(f"β = {c['beta']:g}{' (default)' * (c['beta'] == default)}" for c in cells[1:])]
    for row in range(0, len(cells[0]["texts"]), samples):
        prompt = Coloured(cells[0]["texts"][row]["prompt"], style="bold")
        table = Table(box=None, padding=(0, 2, 0, 0), title=prompt, title_justify="left")
        table.add_column("", no_wrap=True)
        table.add_column("judge", justify="right", no_wrap=True)
        table.add_column("continuation", overflow="fold")
        for beta, cell in zip(betas, cells, strict=True):
            text = cell["texts"][row]
            table.add_row(beta, _show_score(text["score"]), _colour(text["tokens"], default))
        screen.print(table)
        screen.print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"means of {len(cells[0]['texts'])} texts", no_wrap=True)
    for column in ("judge", "perplexity", "ms per token"):
        table.add_column(column, justify="right", no_wrap=True)
    for beta, cell in zip(betas, cells, strict=True):
        means = (f"{cell[name]:.1f} (×{cell[name] / cells[0][name]:.2f})" for name in ("perplexity", "ms_per_token"))
        table.add_row(beta, _show_score(cell["score"]), *means)
    screen.print(table)
    screen.print()


def _show_score(score: float | None) -> str:
    return "blank" if score is None else f"{score:.2f}"


def _colour(tokens: list[dict[str, Any]], default_beta: float) -> Coloured:
    """Colour each token by its reward: blue for a low one, orange for a high one.

    Most text is not toxic, so a low reward of toxicity has no colour.
    """
    pieces = [token["token"].replace("\n", "↵") for token in tokens]
    pieces[0] = pieces[0].lstrip(" ")
    rewards = [token["reward"] for token in tokens]
    return coloured(zip(pieces, rewards, strict=True), -1 if default_beta < 0 else 0, 1)
