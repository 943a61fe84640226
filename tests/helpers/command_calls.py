"""A small call that works for every command. Tests then change one of its options.

`CALLS` maps the words of a command to its arguments, by their names in Python. In their values, {world} is a folder
with toy models and data, made once, and {here} an empty folder, made anew for each call.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import tyro
import yaml
from classifiers import WORDS, make_classifier
from public_checkpoints import PublicRad, config_folder
from sweep_folders import make_run

from radq.cli import COMMANDS, find_command, main
from radq.models.kinds import RadQ, RadV
from radq.toy import make_reviews

Call = dict[str, list[str]]  # values by the name of the option

_TRAINING = {
    "data": ["{world}/reviews.csv"],
    "labels": ["praise"],
    "backbone": ["{world}/toy"],
    "out": ["{here}/out"],
    "cache": ["{here}/cache"],
    "max_steps": ["2"],
    "batch_size": ["4"],
    "max_length": ["12"],
}
CALLS: dict[tuple[str, ...], Call] = {
    ("demo",): {"prompt": ["the film"], "samples": ["1"], "sentiment_betas": ["5"], "toxicity_betas": ["-5"]},
    ("generate",): {
        "base": ["{world}/toy"],
        "guide": ["{world}/q:praise=5"],
        "prompt": ["the film"],
        "max_new_tokens": ["3"],
        "samples": ["2"],
    },
    ("serve",): {"config": ["{world}/serve.yaml"], "check": []},
    ("score",): {"reward": ["{world}/q"], "data": ["{world}/reviews.csv"], "out": ["{here}/scored.csv"]},
    ("train",): _TRAINING,
    ("distill",): _TRAINING
    | {
        "teacher": ["{world}/v"],
        "base": ["{world}/toy"],
        "num_prefixes": ["4"],
        "prefix_tokens": ["3"],
        "candidates": ["4"],
    },
    ("rank", "data"): {
        "files": ["{world}/reviews.csv"],
        "labels": ["praise"],
        "backbone": ["{world}/toy"],
        "ranks": ["0,2"],
        "iterations": ["3"],
        "cache": ["{here}/cache"],
    },
    ("rank", "model"): {
        "reward": ["{world}/q"],
        "data": ["{world}/reviews.csv"],
        "rows": ["2,4"],
        "cache": ["{here}/cache"],
    },
    ("rank", "verify"): {"matrix": ["{world}/matrix.npz"], "certificate": ["{world}/certificates/rank-2.safetensors"]},
    ("train-experts",): _TRAINING,
    ("eval", "sweep"): {"config": ["{world}/sweep.yaml"], "out": ["{here}/out"], "cache": ["{here}/cache"]},
    ("calibrate",): {
        "folder": ["{world}/strong"],
        "base": ["{world}/toy"],
        "prompts": ["{world}/openings.txt"],
        "judge": ["reward:{world}/strong"],
        "levels": ["5", "20"],
        "max_perplexity_ratio": ["50"],
        "samples": ["4"],
        "max_new_tokens": ["6"],
        "top_k": ["8"],
        "resamples": ["10"],
        "plot": ["{here}/plot.svg"],
        "cache": ["{here}/cache"],
    },
    ("eval", "choices"): {
        "data": ["{world}/questions.jsonl"],
        "base": ["{world}/toy"],
        "guide": ["{world}/q:praise=5"],
    },
    ("eval", "measure"): {
        "files": ["{world}/generations.jsonl"],
        "metrics": ["avg_max,perplexity,dist_2"],
        "judge": ["classifier:{world}/classifier"],
        "perplexity": ["{world}/toy"],
        "resamples": ["10"],
        "cache": ["{here}/cache"],
    },
    ("judge", "score"): {
        "judge": ["classifier:{world}/classifier"],
        "data": ["{world}/reviews.csv"],
        "out": ["{here}/scored.csv"],
        "cache": ["{here}/cache"],
    },
    ("judge", "train"): {
        "data": ["{world}/words.csv"],
        "labels": ["praise"],
        "out": ["{here}/out"],
        "encoder": ["{world}/encoder"],
    },
    ("report",): {"runs": ["{world}/run"], "out": ["{here}/out"]},
    ("bench",): {
        "lm": ["{world}/toy"],
        "top_k": ["4", "0"],
        "rows": ["2"],
        "prompt_tokens": ["5"],
        "new_tokens": ["1"],
        "rounds": ["1"],
        "out": ["{here}/out"],
    },
    ("convert",): {"checkpoint": ["{world}/public.bin"], "out": ["{here}/out"], "backbone": ["{world}/backbone"]},
}


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command, or a positional argument, as `Arguments` declares it."""

    name: str
    kind: Any
    positional: bool

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def find_commands() -> dict[tuple[str, ...], list[Option]]:
    """All commands and subcommands of the program, as words, with their options."""
    found = {}
    for name in COMMANDS:
        arguments, *_ = find_command(name)
        if dataclasses.is_dataclass(arguments):
            found[name,] = list(_options(arguments))
            continue
        for part in typing.get_args(arguments):
            kind, *marks = typing.get_args(part)
            subcommand = next(mark.name for mark in marks if hasattr(mark, "name"))
            found[name, subcommand] = list(_options(kind))
    return found


def _options(kind: Any) -> Iterator[Option]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        inner, marks = _unwrap(hints[field.name])
        if tyro.conf.Suppress not in marks:
            yield Option(field.name, inner, tyro.conf.Positional in marks)


def _unwrap(hint: Any) -> tuple[Any, list[Any]]:
    """Split a type into the type inside `Annotated` and tyro's marks."""
    if not hasattr(hint, "__metadata__"):
        return hint, []
    inner, marks = _unwrap(hint.__origin__)
    positional = typing.get_args(tyro.conf.Positional[int])[1:]
    suppressed = typing.get_args(tyro.conf.Suppress[int])[1:]
    known = {*(tyro.conf.Positional for mark in hint.__metadata__ if mark in positional)}
    known |= {*(tyro.conf.Suppress for mark in hint.__metadata__ if mark in suppressed or mark is tyro.conf.Suppress)}
    return inner, [*marks, *known]


def write_call(command: tuple[str, ...], options: list[Option], call: Call, **places: Path) -> list[str]:
    """The words of a command line with these options; {world} and {here} become the folders in `places`."""
    words: list[str] = []
    for option in sorted(options, key=lambda option: not option.positional):
        values = call.get(option.name)
        if values is None:
            continue
        for place, folder in places.items():
            values = [value.replace(f"{{{place}}}", str(folder)) for value in values]
        words += values if option.positional else [option.flag, *values]
    return [*command, *words]


def kinds_of(hint: Any) -> set[Any]:
    """The plain types that a hint is made of: {int, NoneType} for int | None."""
    if typing.get_origin(hint) in (list, tuple, typing.Union, types.UnionType):
        return set().union(*(kinds_of(part) for part in typing.get_args(hint)))
    return {hint}


def make_world(folder: Path, toy: Path) -> Path:
    """Make the toy models and data that `CALLS` names."""
    (folder / "toy").symlink_to(toy)
    torch.manual_seed(0)
    for name, kind in (("q", RadQ), ("v", RadV)):
        kind.from_backbone(toy, attributes=["praise"]).save_pretrained(folder / name)
    make_steering_model(toy, ["praise"]).save_pretrained(folder / "strong")
    make_classifier(folder / "classifier")
    make_classifier(folder / "encoder", kind="encoder")
    rows = "".join(f'"{text}",{praise}\n' for text, praise in make_reviews(40))
    (folder / "reviews.csv").write_text("text,praise\n" + rows)
    texts = [f"{a} {b}" for a in WORDS[4:] for b in ("good", "bad")]
    (folder / "words.csv").write_text("text,praise\n" + "".join(f"{text},{'good' in text:d}\n" for text in texts))
    lines = [{"text": prompt, "continuations": [" was good", " is bad"]} for prompt in ("the film", "a plot")]
    (folder / "generations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "prompts.txt").write_text("the film\nthe plot was\n")
    write_openings(folder / "openings.txt")
    questions = [{"question": "the film was", "choices": [" good", " bad"], "answer": number} for number in (0, 1)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "sweep.yaml").write_text(yaml.safe_dump(make_sweep(folder)))
    serve = {"base": str(folder / "toy"), "guides": {"praise": f"{folder / 'q'}:praise=5"}}
    (folder / "serve.yaml").write_text(yaml.safe_dump(serve))
    make_run(folder / "run", guides={"rad-q": 1.0, "rad-v": 1.15}, groups=("all",))
    torch.save(PublicRad("gpt2", 7).state_dict(), folder / "public.bin")
    config_folder("gpt2", folder / "backbone")
    data = ["rank", "data", str(folder / "reviews.csv"), "--labels", "praise", "--backbone", str(toy), "--ranks", "2"]
    saved = ["--save-matrix", str(folder / "matrix.npz"), "--certificates", str(folder / "certificates")]
    assert main([*data, *saved, "--iterations", "3", "--cache", str(folder / "cache"), "--json"]) == 0
    return folder


def make_steering_model(toy: Path, attributes: list[str]) -> RadQ:
    """A reward model whose rewards differ so much that it steers; that of `from_backbone` has equal ones."""
    model = RadQ.from_backbone(toy, attributes=attributes, response_range=(-1.0, 1.0))
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def write_openings(file: Path) -> None:
    """Write thirty beginnings of the toy's reviews."""
    nouns, verbs = ("film", "plot", "story", "actor", "movie", "scene"), ("was", "is", "has", "seems", "and")
    file.write_text("".join(f"the {noun} {verb}\n" for noun in nouns for verb in verbs))


def make_sweep(world: Path) -> dict[str, Any]:
    """A small sweep that uses every setting that YAML can name."""
    return {
        "base": str(world / "toy"),
        "prompts": [{"file": str(world / "prompts.txt"), "group": "all", "limit": 2}],
        "guides": {"rad-q": {"folder": str(world / "q"), "weights": {"praise": 1}, "beta": [5, 10], "clamp": True}},
        "judges": {"mood": {"judge": f"classifier:{world / 'classifier'}", "metrics": ["avg_max"], "reads": "text"}},
        "metrics": ["perplexity", "dist_2"],
        "perplexity": "base",
        "samples": 2,
        "max_new_tokens": 2,
        "temperature": 1.0,
        "top_k": [8],
        "top_p": [None],
        "kl_budget": [None],
        "seeds": [0],
        "batch_size": 4,
        "resamples": 5,
        "dtype": "auto",
    }
