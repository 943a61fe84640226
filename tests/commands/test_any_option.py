"""Nothing that a user can type ends in a traceback: random values for every option of every command.

Each example takes a small call that works and replaces one or two options. It must end with exit code 0 or 2, and with
2 one line says what was wrong. `RADQ_EXAMPLES=200` tries so many per command; CI tries a few, always the same ones.
"""

import os
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_calls import CALLS, Call, Option, find_commands, kinds_of, make_sweep, make_world, write_call
from command_runs import find_errors, odd_files, run_quietly
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from word_judge import GoodWords

from radq.evaluation import demonstration
from radq.evaluation.demonstration import ATTRIBUTES, DemoModels
from radq.models.kinds import RadQ
from radq.models.loading import load
from radq.sources import embedded

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("RADQ_EXAMPLES", "0"))
COMMANDS = find_commands()

# Numbers are small, wrong, or too large for any machine. What lies between only takes long, which is no mistake.
NUMBERS = ["0", "1", "2", "3", "-1", "-0", "0.5", "2.5", "1e-320", "nan", "inf", "-inf", "1e400", "1e300", "-1e300"]
NUMBERS += [str(10**30), str(-(10**30)), str(10**400), str(2**63), str(2**31), "1_0", "0x10", "٣", "1,2", "1e3e3"]
TEXTS = ["", " ", "a", "nonsense", "ä中😀", "\x01\x1b[31m\x07", "\udcff", ",", "a,a", "a,b", "[]", "{}", '{"a": 1}']
TEXTS += ["null", "None", "True", "-", "--", "--json", "#", ":", "=", "a=b", ":a=1", "%s %d {}", "\\", "'", '"', "\n"]
TEXTS += ["x" * 5000]
DEVICES = ["cpu", "cuda", "cuda:9", "cuda:-1", "meta", "mps", "xpu", "cpu:7", "tpu", "vulkan", "hip", "xla:0"]
PATHS = [  # {here} has these
    "{here}/missing",
    "{here}/folder",
    "{here}/empty",
    "{here}/empty.csv",
    "{here}/empty.jsonl",
    "{here}/binary",
    "{here}/binary.csv",
    "{here}/binary.jsonl",
    "{here}/binary.parquet",
    "{here}/binary.npz",
    "{here}/binary.safetensors",
    "{here}/list.yaml",
    "{here}/list.jsonl",
    "{here}/numbers.jsonl",
    "{here}/text.txt",
    "{here}/text.csv",
    "{here}/text.csv/child",
    "{here}/locked",
    "{here}/locked/child",
    "{here}/" + "x" * 300,
    "/dev/null",
    "/proc/self/cmdline",
    "missing/{here}",
]
FOLDERS = ["{world}", "{world}/toy", "{world}/q", "{world}/v", "{world}/classifier", "{world}/run", "embedded", "/"]
FOLDERS += [f"{{world}}/{name}" for name in ("reviews.csv", "generations.jsonl", "sweep.yaml", "matrix.npz")]
SPECIFICATIONS = [  # of guides and judges: a kind, a folder, and what follows it
    *(f"{{world}}/q:praise={beta}" for beta in ("nan", "inf", "1e300", "", "much", "0")),
    *("{world}/q:other=1", "{world}/q", "{world}/q:"),
    *("{world}/toy:praise=1", "{world}/v:praise=1,praise=2", "{here}/binary:praise=1", "embedded:nonsense=1"),
    *("classifier:{world}/toy", "classifier:{world}/classifier#other", "classifier:{here}/folder", "classifier:"),
    *("onnx:{world}/classifier", "linear:{world}/q", "linear:embedded:other", "reward:{world}/q", "reward:{world}/toy"),
    *("reward:{world}/q#other", "not:not:classifier:{world}/classifier", "not:", "openai:", "openai:m#{here}/text.txt"),
]
OUTPUTS = ("out", "cache", "save_matrix", "certificates", "plot")  # these are never pointed at a folder outside {here}
LONG_WORK = (
    "max_steps",
    "num_prefixes",
    "epochs",
    "iterations",
    "tolerance",
)  # a large number there asks for long work alone


def values_for(option: Option) -> st.SearchStrategy[str]:
    """Values of the option's own kind come three times as often as all others together."""
    numbers = [text for text in NUMBERS if option.name not in LONG_WORK or not _is_large(text)]
    strange = [*TEXTS, *PATHS, *numbers]
    kinds = kinds_of(option.kind)
    if option.name == "device":
        fitting = DEVICES
    elif kinds & {int, float}:
        fitting = numbers
    elif option.name in OUTPUTS:
        fitting = PATHS
    else:
        fitting = [*PATHS, *FOLDERS, *SPECIFICATIONS]
        strange = strange if Path in kinds else [*strange, *FOLDERS]
    fits = st.sampled_from(fitting)
    return fits | fits | fits | st.sampled_from(strange)


def _is_large(number: str) -> bool:
    try:
        return float(number) > 3
    except ValueError:
        return False


@st.composite
def changes(draw: st.DrawFn, options: list[Option]) -> Call:
    """One or two options with random values; two values where an option takes several."""
    chosen = draw(st.lists(st.sampled_from(options), min_size=1, max_size=2, unique_by=lambda option: option.name))
    found = {}
    for option in chosen:
        if kinds_of(option.kind) == {bool}:
            found[option.name] = draw(st.sampled_from([[], [], ["nonsense"]]))
        else:
            several = typing.get_origin(option.kind) in (list, tuple)
            found[option.name] = draw(st.lists(values_for(option), min_size=1, max_size=2 if several else 1))
    return found


@pytest.fixture(scope="module")
def world(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"), toy)


@pytest.fixture(scope="module", autouse=True)
def small_demo(toy: Path) -> Iterator[None]:
    """`radq demo` with the toy in place of a model that need not be installed."""

    def load_demo_models(device: str = "cpu") -> DemoModels:
        torch.manual_seed(0)
        rewards = {name: RadQ.from_backbone(toy, attributes=[name]).eval() for name in ATTRIBUTES}
        judges = {name: GoodWords() for name in ATTRIBUTES}
        return DemoModels(*load(toy, device), dict(rewards), dict(judges))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demonstration, "load_demo_models", load_demo_models)
        patch.setattr(embedded, "find_embedded", lambda: Path("model.gguf"))
        yield


def check(argv: list[str]) -> int:
    try:
        code, error = run_quietly(argv)
    except Exception as error:
        raise AssertionError(f"radq {' '.join(map(repr, argv))[:2000]} ended in {type(error).__name__}") from error
    assert code in (0, 2), (argv, code)
    if code == 2:
        assert len(find_errors(error)) == 1, (argv, error)
    return code


def test_every_command_has_a_call_that_works(world: Path) -> None:
    assert CALLS.keys() == COMMANDS.keys()
    for command, call in CALLS.items():
        with odd_files() as here:
            code, error = run_quietly(write_call(command, COMMANDS[command], call, world=world, here=here))
        assert code == 0, (command, error)


def _settings(examples: int) -> Any:
    """In CI the same examples every time; by hand, others at each run."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("command", CALLS, ids=" ".join)
def test_any_value_of_any_option(command: tuple[str, ...], world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(world / "user-cache"))
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    @_settings(8)
    @given(changes(COMMANDS[command]))
    def try_one(change: Call) -> None:
        with odd_files() as here:
            check(write_call(command, COMMANDS[command], CALLS[command] | change, world=world, here=here))

    try_one()


YAML_VALUES = [None, True, 0, 1, -1, 2, 0.5, float("nan"), float("inf"), -float("inf"), 1e300, 10**30, "", "a", "1e-1"]
YAML_VALUES += ["nonsense", [], [[]], [None], {}, {"a": 1}, {1: 2}, {None: None}, [{}], [1, "a"], "{here}/missing"]
YAML_VALUES += ["{here}/binary", "{here}/folder", "x" * 3000]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a YAML document can be changed."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from _places(part, (*path, key))


def test_any_value_in_the_yaml_of_a_sweep(world: Path) -> None:
    @_settings(20)
    @given(st.data())
    def try_one(data: st.DataObject) -> None:
        sweep = make_sweep(world)
        *parents, last = data.draw(st.sampled_from(list(_places(sweep))))
        part: Any = sweep
        for key in parents:
            part = part[key]
        value = data.draw(st.sampled_from(YAML_VALUES))
        with odd_files() as here:
            part[last] = value.replace("{here}", str(here)) if isinstance(value, str) else value
            (here / "sweep.yaml").write_text(yaml.safe_dump(sweep))
            check(["eval", "--config", "sweep.yaml", "--out", "out", "--cache", "cache", "--json"])
            shutil.rmtree(here / "out", ignore_errors=True)

    try_one()
