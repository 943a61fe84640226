"""Requests to the base model: the tokens that it reads, and likelihoods without the request."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from families import make_lm, make_number_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from radq import generate
from radq.cli import main
from radq.errors import OptionError
from radq.evaluation.perplexity import measure_likelihoods
from radq.evaluation.sweep.config import GuideSweep, PromptFile, Sweep, load_sweep
from radq.evaluation.sweep.generate import add_request
from radq.files import read_lines

TEMPLATE = (
    "{% for m in messages %}{{ '20 ' if m.role == 'user' else '21 ' }}{{ m.content }} 22 {% endfor %}"
    "{% if add_generation_prompt %}21 {% endif %}"
)
PROMPTS = ["the film was", "the plot"]
REQUESTS = ["this story is great", "a great movie"]


def test_the_base_reads_the_request_and_goes_on_with_the_prompt() -> None:
    lm, tokenizer = make_lm("gpt2"), make_number_tokenizer()
    tokenizer.chat_template = TEMPLATE
    asked = add_request(tokenizer, "7 8", ["5 9", ""])
    assert asked == [[20, 7, 8, 5, 9, 22, 21, 5, 9], [20, 7, 8, 22, 21]]
    read: list[list[int]] = []
    lm.register_forward_pre_hook(lambda _, __, kwargs: read.append(kwargs["input_ids"][0].tolist()), with_kwargs=True)
    (generation,) = generate(lm, tokenizer, asked[:1], max_new_tokens=2)
    assert read[0] == asked[0]
    assert generation.text.split() == [str(token) for token in generation.token_ids]


def test_a_base_without_a_chat_template_reads_plain_text() -> None:
    assert add_request(make_number_tokenizer(), "7 8", ["5 9"]) == ["7 8\n\n5 9"]


def test_a_template_that_refuses_is_named() -> None:
    tokenizer = make_number_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no chats') }}{{ messages[0].content }}"
    with pytest.raises(OptionError, match="refuses a request: no chats"):
        add_request(tokenizer, "7", ["5"])


# --- sweeps ---


@pytest.fixture(scope="module")
def base(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "toy"
    shutil.copytree(toy, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'it said ' if m.role == 'user' else 'this ' }}{{ m.content }} . {% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that asks twice, and measures perplexity and KL while decoding."""
    folder = tmp_path_factory.mktemp("asked")
    rows = "".join(json.dumps({"prompt": {"text": text}}) + "\n" for text in PROMPTS)
    (folder / "prompts.jsonl").write_text(rows)
    settings = {
        "base": str(base),
        "prompts": [{"file": str(folder / "prompts.jsonl")}],
        "guides": {"asked": {"ask": REQUESTS}},
        "metrics": ["perplexity", "kl"],
        "perplexity": "base",
        "samples": 3,
        "max_new_tokens": 5,
        "top_k": 8,
        "kl_budget": [None, 0.5],
        "resamples": 20,
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    assert main(["eval", "--json", "--config", str(folder / "sweep.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_a_request_is_a_cell(run: Path) -> None:
    names = [cell.name for cell in load_sweep(run / "config.yaml").cells()]
    assert names == ["none k=8 seed=0", "asked ask=1 k=8 seed=0", "asked ask=2 k=8 seed=0"]
    assert [row["cell"] for row in read_lines(run / "metrics.jsonl")] == names
    assert main(["eval", "--json", "--config", str(run.parent / "sweep.yaml"), "--out", str(run)]) == 0  # nothing to do


def test_texts_are_those_of_the_chat_and_likelihoods_those_of_the_prompt(run: Path, base: Path) -> None:
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(base).eval(), AutoTokenizer.from_pretrained(base)
    rows = {(row["cell"], row["prompt"]): row for row in read_lines(run / "generations.jsonl")}
    for number, request in enumerate(REQUESTS, start=1):
        chats = [f"it said {request}\n\n{prompt} . this {prompt}" for prompt in PROMPTS]
        asked = [tokenizer(chat, add_special_tokens=False).input_ids for chat in chats]
        drawn = generate(lm, tokenizer, asked, top_k=8, max_new_tokens=5, samples=3)
        for index, prompt in enumerate(PROMPTS):
            row, samples = rows[f"asked ask={number} k=8 seed=0", index], drawn[3 * index : 3 * index + 3]
            assert row["continuations"] == [sample.text for sample in samples]
            assert row["drawn_nll"] == pytest.approx([sample.drawn_nll for sample in samples], abs=1e-3)
            expected = measure_likelihoods(lm, tokenizer, [prompt] * 3, row["continuations"])
            assert row["nll"] == pytest.approx(expected.nll, abs=1e-3)
            assert row["tokens"] == expected.tokens.tolist()
            assert row["nll"] != pytest.approx([sample.nll for sample in samples], abs=1e-2)


def test_kl_is_the_mean_gap_of_the_likelihoods(run: Path) -> None:
    lines = list(read_lines(run / "generations.jsonl"))
    for row in read_lines(run / "metrics.jsonl"):
        here = [line for line in lines if line["cell"] == row["cell"]]
        nll, drawn, tokens = (np.array([line[name] for line in here]) for name in ("nll", "drawn_nll", "tokens"))
        assert row["metrics"]["kl"]["value"] == pytest.approx((nll - drawn).sum() / tokens.sum())
        assert row["metrics"]["kl"]["value"] > 0


@pytest.mark.parametrize(
    ("guide", "options", "problem"),
    [
        ({"ask": []}, {}, "has a blank request"),
        ({"ask": ["write well", " "]}, {}, "has a blank request"),
        ({"ask": ["write well"], "beta": [1.0]}, {}, "takes no beta"),
        ({"ask": ["write well"], "folder": "q"}, {}, "takes no folder"),
        ({"weights": {"a": 1.0}, "beta": [1.0]}, {}, "has no 'folder'"),
        ({"folder": "q", "beta": [1.0]}, {}, "has no 'weights'"),
        ({"ask": ["write well"]}, {"engine": "vllm"}, "the engine 'vllm' cannot do"),
    ],
)
def test_mistakes_are_named(guide: dict[str, Any], options: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        Sweep("base", [PromptFile("p")], {"g": GuideSweep(**guide)}, **options)
