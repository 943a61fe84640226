"""radq judge score: scores of a table by an LLM or another judge, also after kills; one line for mistakes."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas
import pytest
from chat_servers import Answer, faking, make_grader, read_text, refuse, say
from classifiers import make_classifier
from command_runs import fails
from kills import run_and_kill
from serving import Running, make_config, serving

from radq.cli import main
from radq.data.tables import read_table
from radq.judges import chat
from radq.judges.models import load_judge
from radq.registry.config import RequestLimits

RUBRIC = "How long is the text?\n\nScale: 1 (short) to 5 (long)\n"
TEXTS = [f"{'very ' * (n % 13)}good film {n}" for n in range(60)]


def grade(text: str) -> float:
    return len(text) % 9 / 2 + 1


def answer_well(number: int, body: dict[str, Any]) -> Answer:
    return say(f"{grade(read_text(body)):g}")


def fail_often(number: int, body: dict[str, Any]) -> Answer | None:
    """Every fifth call fails, in one of five ways."""
    if number % 5:
        return answer_well(number, body)
    failures = [refuse(429, headers={"Retry-After": "0"}), refuse(500), say("It is quite long."), None, refuse(503)]
    return failures[number // 5 % len(failures)]


@pytest.fixture(autouse=True)
def rubric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "FIRST_WAIT", 0.001)
    monkeypatch.chdir(tmp_path)
    Path("rubric.md").write_text(RUBRIC)
    monkeypatch.setenv("OPENAI_API_KEY", "hush-hush")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda address: monkeypatch.setenv("OPENAI_BASE_URL", address)


def write_table(name: str, texts: list[str]) -> str:
    frame = pandas.DataFrame({"id": range(len(texts)), "text": texts})
    writers = {
        ".csv": lambda: frame.to_csv(name, index=False),
        ".jsonl": lambda: frame.to_json(name, orient="records", lines=True),
        ".parquet": lambda: frame.to_parquet(name),
    }
    writers[Path(name).suffix]()
    return name


def read_scores(name: str, column: str = "score") -> list[float | None]:
    values = pandas.concat(list(read_table(name)))[column]
    numbers = pandas.to_numeric(values.replace("", None))
    return [None if value != value else float(value) for value in numbers]


def ask(*more: str, data: str = "texts.csv", out: str = "scored.csv") -> list[str]:
    base = ["judge", "score", "--judge", "openai:m", "--rubric", "rubric.md", "--data", data, "--out", out]
    return [*base, "--cache", "cache", "--jobs", "4", *more]


def count_kept() -> int:
    with closing(sqlite3.connect("cache/judges.sqlite")) as database:
        return database.execute("SELECT count(*) FROM scores").fetchone()[0]


@pytest.mark.parametrize("name", ["texts.csv", "texts.jsonl", "texts.parquet"])
def test_tables_of_all_formats(name: str, use: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    texts = [*TEXTS[:5], TEXTS[1], "  "]
    out = f"scored{Path(name).suffix}"
    with faking(answer_well) as (fake, address):
        use(address)
        assert main(ask("--json", "--name", "length", data=write_table(name, texts), out=out)) == 0
    document = json.loads(capsys.readouterr().out)
    assert read_scores(out, "length") == [*map(grade, texts[:-1]), None]
    assert document | {"judge": ""} == {
        "data": name,
        "out": out,
        "judge": "",
        "scored": 6,
        "kept": 0,
        "missing": 0,
        "blank": 1,
        "truncated": 0,
        "usage": {"calls": 5, "failures": 0, "prompt_tokens": 500, "completion_tokens": 10},
    }
    assert len(fake.calls) == 5


def test_every_row_is_scored_once_though_calls_fail_and_the_process_is_killed_twice(
    use: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write_table("texts.csv", TEXTS)
    short = ("--timeout", "2")  # for calls that stall
    with faking(fail_often) as (fake, address):
        use(address)
        for kept, stores in ((13, 13), (24, 11)):
            run_and_kill("radq.judges.base:CachedJudge._store", stores, ask(*short))
            assert count_kept() == kept
            assert not Path("scored.csv").exists()
        fake.texts.clear()
        assert main(ask(*short)) == 0
        said = capsys.readouterr().out
        assert read_scores("scored.csv") == [*map(grade, TEXTS)]
        assert "60 texts scored, 24 of them before; 0 missing, 0 blank" in said
        assert len({*fake.texts}) == 36  # those that were kept are not asked for again
        before = len(fake.calls)
        assert main(ask(out="again.csv")) == 0
        assert len(fake.calls) == before
        assert Path("again.csv").read_text() == Path("scored.csv").read_text()
    written = b"".join(file.read_bytes() for file in Path().rglob("*") if file.is_file())
    assert b"hush" not in written
    assert "hush" not in said


def test_prose_is_missing_and_never_guessed(use: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    write_table("texts.csv", TEXTS[:6])
    with faking(lambda number, body: say("A fine 4!" if read_text(body) == TEXTS[2] else "4")) as (fake, address):
        use(address)
        with pytest.warns(UserWarning, match="1 of 6 texts have no score: 'A fine 4!' is not one number from 1 to 5"):
            assert main(ask()) == 0
    assert read_scores("scored.csv") == [4, 4, None, 4, 4, 4]
    said = capsys.readouterr().out
    assert "5 texts scored, 0 of them before; 1 missing, 0 blank" in said
    assert "8 answers, after 0 failures: 800 tokens read, 16 written" in said


def test_printed_scores(use: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    with faking(answer_well) as (_, address):
        use(address)
        argv = ["judge", "score", "--judge", "openai:m#rubric.md", "a film", " ", "--cache", "cache"]
        assert main(argv) == 0
        said = capsys.readouterr().out
        assert main([*argv, "--json"]) == 0
    assert f"{grade('a film'):.3f}" in said
    assert "blank" in said
    document = json.loads(capsys.readouterr().out)
    assert document["texts"] == [{"text": "a film", "score": grade("a film")}, {"text": " ", "score": None}]
    assert (document["kept"], document["usage"]["calls"]) == (1, 0)


# --- other judges ---


def test_every_other_judge_writes_labels_too(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["a good film", "the plot was dull", "fine"]
    write_table("texts.csv", texts)
    make_classifier(Path("classifier"))
    make_classifier(Path("regression"), ["reward"], problem_type="regression")
    for judge in ("classifier:classifier", "not:classifier:classifier", "classifier:regression"):
        argv = [
            "judge",
            "score",
            "--judge",
            judge,
            "--data",
            "texts.csv",
            "--out",
            "out.csv",
            "--overwrite",
            "--cache",
            "cache",
        ]
        assert main([*argv, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["usage"] is None
        assert read_scores("out.csv") == pytest.approx(load_judge(judge).score(texts).tolist(), rel=1e-5)
    assert main(["judge", "score", "--judge", "classifier:regression", "fine", "--cache", "cache"]) == 0


# --- a real server ---


@pytest.fixture
def server(toy: Path, tmp_path: Path) -> Callable[..., Any]:
    def start(base: Path, **limits: int) -> Any:
        return serving(
            make_config(tmp_path, base=str(base), guides={}, models={}, limits=RequestLimits(**limits)), "hush-hush"
        )

    return start


def test_radq_serve_answers(server: Callable[..., Any], use: Callable[[str], None]) -> None:
    write_table("texts.csv", TEXTS[:8])
    running: Running
    with server(make_grader(Path("grader").absolute()), prompt_tokens=400, max_tokens=64) as running:
        use(f"{running.address}/v1")
        assert main(ask("--judge", "openai:grader")) == 0
    assert read_scores("scored.csv") == [4] * 8


def test_a_toy_without_numbers_leaves_all_scores_missing(
    toy: Path, server: Callable[..., Any], use: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write_table("texts.csv", TEXTS[:3])
    running: Running
    with server(toy, prompt_tokens=40, max_tokens=20) as running:
        use(f"{running.address}/v1")
        with pytest.warns(UserWarning, match="3 of 3 texts have no score: the server refuses it"):
            assert main(ask("--judge", f"openai:{toy.name}")) == 0
        assert read_scores("scored.csv") == [None] * 3
        capsys.readouterr()
        assert "has no model 'other'" in fails(capsys, *ask("--judge", "openai:other", "--json", out="other.csv"))
        use(f"{running.address}/v2")
        assert "give the address with /v1" in fails(capsys, *ask("--json", out="other.csv"))


# --- mistakes ---


def test_mistakes(
    use: Callable[[str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table("texts.csv", TEXTS[:2])
    use("http://127.0.0.1:9/v1")
    Path("vague.md").write_text("Is it good?\n")
    assert 'add a line such as "Scale: 1 to 5"' in fails(capsys, *ask("--rubric", "vague.md"))
    assert "cannot be read" in fails(capsys, *ask("--rubric", "nowhere.md"))
    assert "two rubrics" in fails(capsys, *ask("--judge", "openai:m#rubric.md"))
    assert "no rubric" in fails(capsys, "judge", "score", "a", "--judge", "openai:m")
    assert "names no model" in fails(capsys, *ask("--judge", "openai:"))
    assert "leave --rubric out" in fails(capsys, *ask("--judge", "linear:embedded:sentiment"))
    assert "begin with one of classifier" in fails(capsys, *ask("--judge", "oracle:m"))
    assert "jobs must be at least 1" in fails(capsys, *ask("--jobs", "0"))
    assert "timeout must be more than 0" in fails(capsys, *ask("--timeout", "0"))
    assert "max_tokens must be" in fails(capsys, *ask("--max-tokens", "0"))
    assert "name must not be empty" in fails(capsys, *ask("--name", " "))
    assert "has a column 'id' already" in fails(capsys, *ask("--name", "id"))
    assert "one --data FILE, and no other texts" in fails(capsys, *ask("--name", "n", "--device", "cpu", "a"))
    assert "no column 'body'" in fails(capsys, *ask("--text", "body"))
    assert "there is no file" in fails(capsys, *ask(data="nowhere.csv"))
    assert "must be of the format" in fails(capsys, *ask(out="scored.jsonl"))
    Path("scored.csv").touch()
    assert "replace it with --overwrite" in fails(capsys, *ask())
    use("127.0.0.1:9")
    assert "OPENAI_BASE_URL must be" in fails(capsys, *ask("--overwrite"))
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "neither OPENAI_BASE_URL nor OPENAI_API_KEY" in fails(capsys, *ask("--overwrite"))


def test_a_wrong_key_is_not_shown(use: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    write_table("texts.csv", TEXTS[:2])
    with faking(lambda number, body: refuse(401, "hush-hush is no key")) as (_, address):
        use(address)
        error = fails(capsys, *ask("--json"))
    assert "refuses the key: … is no key" in error
    assert "hush" not in error
