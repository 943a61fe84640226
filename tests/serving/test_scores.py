"""Scores of texts: read in parts between the steps of other texts, by few forwards, and the same as in one piece."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import Running, make_config, serving

from radq.models import kv_cache
from radq.models.kinds import RadQ, RadV
from radq.models.prefill import InTurns, Prefill, Turn, finish
from radq.numerics import log_probabilities
from radq.registry.loaded_guides import Served
from radq.serving import scheduler as scheduler_module

TEXT = "the plot was good and the film seemed dull but this music was lovely"


@pytest.fixture(scope="module")
def readouts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Readouts of the toy of both kinds, which read different layers, beside models of their own."""
    folder = tmp_path_factory.mktemp("readouts")
    torch.manual_seed(0)
    for name, kind, layers in (("bright", RadQ, 2), ("dark", RadQ, 1), ("value", RadV, 1)):
        model: Any = kind.from_base(models / "toy", attributes=[name], num_layers=layers)
        with torch.no_grad():
            for parameter in [*model.head.parameters(), *model.readout.parameters()]:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(folder / name)
    names = {name: f"{folder / name}:{name}" for name in ("bright", "dark", "value")}
    return names | {"praise": f"{models / 'q'}:praise", "length": f"{models / 'v'}:length"}


@pytest.fixture(scope="module")
def served(models: Path, readouts: dict[str, str]) -> Served:
    return Served(make_config(models, guides=readouts, models={}))


@torch.no_grad()
def scores_at_once(served: Served, ids: list[int]) -> tuple[list[float], dict[str, list[float]]]:
    """The scores of a text, for which every model reads it at once by its own forward."""
    input_ids = torch.tensor([ids])
    logits: Any = served.lm(input_ids=input_ids).logits
    return log_probabilities(logits[0, :-1], input_ids[0, 1:]).tolist(), served.loaded.token_rewards(ids)


@pytest.mark.parametrize("tokens", [1, 4, 5, 1000])
def test_scores_in_parts_are_those_at_once(served: Served, tokens: int) -> None:
    ids = served.encode(TEXT)
    prefill, turns = Prefill(lambda turn: served.score(ids, turn)), 1
    while not prefill.read(tokens):
        turns += 1
    assert prefill.result is not None
    scored = prefill.result["tokens"]
    expected, wanted = scores_at_once(served, ids)
    assert [token["logprob"] for token in scored[1:]] == pytest.approx(expected, abs=1e-5)
    assert list(prefill.result["rewards"]) == ["bright", "dark", "value", "praise", "length"]
    for name, values in wanted.items():
        assert [token["rewards"][name] for token in scored] == pytest.approx(values, abs=1e-5)
    assert turns >= 3 * len(ids) // tokens  # the base model and two reward models of their own


def test_readouts_share_the_forward_of_the_base(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [0], type(served.lm.transformer).forward

    def count(self: Any, *given: Any, **named: Any) -> Any:
        calls[0] += self is served.lm.transformer
        return forward(self, *given, **named)

    monkeypatch.setattr(type(served.lm.transformer), "forward", count)
    finish(served.score(served.encode(TEXT), Turn()))
    assert calls == [1]


def columns_of_turns(monkeypatch: pytest.MonkeyPatch, running: Running) -> list[int]:
    """Let a list grow with the columns that are read in each turn of the scheduler."""
    monkeypatch.setattr(scheduler_module, "PROMPT_BUDGET", {"cpu": 4})
    turns, extend = [0], kv_cache.extend
    choose: Callable[[], None] = running.server.scheduler._read_prompts_or_do_task

    def count(model: Any, prefix: Any, tokens: torch.Tensor, *rest: Any, **options: Any) -> Any:
        turns[-1] += tokens.numel()
        return extend(model, prefix, tokens, *rest, **options)

    def begin_turn() -> None:
        turns.append(0)
        choose()

    monkeypatch.setattr(kv_cache, "extend", count)
    monkeypatch.setattr(running.server.scheduler, "_read_prompts_or_do_task", begin_turn)
    return turns


def test_texts_go_on_while_scores_are_read(
    models: Path, readouts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_config(models, guides=readouts, models={})) as running:
        alone = httpx.post(f"{running.address}/radq/score", json={"text": TEXT}, timeout=60).json()
        body = {"prompt": "the film was", "max_tokens": 40, "temperature": 0, "radq": {"bright": 3}}
        httpx.post(f"{running.address}/v1/completions", json=body, timeout=60)  # after which no model is tried
        turns = columns_of_turns(monkeypatch, running)
        with ThreadPoolExecutor(4) as pool:
            texts = [pool.submit(httpx.post, f"{running.address}/v1/completions", json=body, timeout=60)]
            scores = [
                pool.submit(httpx.post, f"{running.address}/radq/score", json={"text": TEXT}, timeout=60)
                for _ in range(3)
            ]
            assert texts[0].result().status_code == 200
            found = [score.result().json() for score in scores]
    assert max(turns) <= 4
    for answer in found:
        assert [one["rewards"] for one in answer["tokens"]] == [
            pytest.approx(one["rewards"], abs=1e-5) for one in alone["tokens"]
        ]


def test_scores_that_nobody_waits_for_are_not_read(running: Running) -> None:
    scheduler = running.server.scheduler
    calls: list[int] = []

    def work(_: Turn) -> InTurns[None]:
        yield from ()
        calls.append(1)

    task = scheduler_module._Task(Prefill(work))
    task.future.cancel()
    assert task.go_on(4)
    assert scheduler.call(lambda: len(calls)).result(60) == 0
