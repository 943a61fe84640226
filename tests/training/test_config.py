"""Settings from YAML and the command line: every value is of its type and in its range, or refused in one line."""

import math
import string
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pandas
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radq.cli import main
from radq.errors import OptionError
from radq.models.heads import HEADS
from radq.models.kinds import RadV
from radq.settings import Range, names_in_table, read_yaml
from radq.toy import make_reviews
from radq.training.config import ExpertTrainingConfig, RewardTrainingConfig
from radq.training.losses import LOSSES
from radq.training.trainer_setup import FIXED, MANAGED, PAPER, choose_precision, make_arguments

COMMANDS = {"train": RewardTrainingConfig, "distill": RewardTrainingConfig, "train-experts": ExpertTrainingConfig}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("labels: [a]", "labels must be one text, got \\['a'\\]"),
        ("num_layers: two", "num_layers must be a whole number, got 'two'"),
        ("out: 5", "out must be one text, got 5.*quotes"),
        ("skip_empty: maybe", "skip_empty must be true or false, got 'maybe'"),
        ("batch_size: 7.9", "batch_size must be a whole number, got 7.9"),
        ("batch_size: true", "batch_size must be a whole number, got True"),
        ("epochs: 0", "epochs must be more than 0.*got 0"),
        ("learning_rate: .nan", "learning_rate must be a finite number, got nan"),
        ("learning_rate: -1", "learning_rate must be at least 0 .*got -1"),
        ("max_steps: 0", "max_steps must be at least 1.*or -1, got 0"),
        ("seed: -1", "seed must be at least 0.*got -1"),
        ("seed: 4294967296", "at most 4,294,967,295"),
        ("data: {a: b}", "data must be one text, got {'a': 'b'}"),
        ("data: [1]", "data must be one text, got 1"),
        ("label_range: [1, 2, 3]", "a list of 2 numbers"),
        ("label_range: [1, x]", "number"),
        ("loss: mae", "loss must be one of mse, ce, got 'mae'"),
        ("trainer: 5", "names with values"),
        ("trainer: {1: 2}", "names with values"),
        ("- data", "must hold names with values"),
        ("5", "must hold names with values, got 5"),
        ("a: b: c", "cannot read"),
        ("? [a]\n: b", "cannot read"),
        ("? 5\n: b", "sets 5, which is no option"),
    ],
)
def test_a_value_of_another_type_or_range_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(OptionError, match=message):
        read_yaml(tmp_path / "settings.yaml", RewardTrainingConfig)


def test_values_that_mean_the_same_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("data: ok.csv\nbatch_size: 8.0\nlearning_rate: 1e-5\nlabel_range: [1, 5]\nnum_layers: null\n")
    found = read_yaml(file, RewardTrainingConfig)
    assert found.data == ["ok.csv"]  # not o, k, ., c, s and v
    assert (found.batch_size, found.learning_rate, found.label_range) == (8, 1e-5, (1.0, 5.0))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="cannot read"):
        read_yaml(file, RewardTrainingConfig)
    made = RewardTrainingConfig(labels="a", backbone="b", out="c")
    made.data = "ok.csv"  # pyright: ignore[reportAttributeAccessIssue]
    made.check()
    assert made.data == ["ok.csv"]


def test_names_of_heads_and_losses_come_from_their_tables() -> None:
    hints = get_type_hints(RewardTrainingConfig)
    assert get_args(hints["head"]) == names_in_table("radq.models.heads:HEADS") == tuple(HEADS)
    assert get_args(hints["loss"]) == names_in_table("radq.training.losses:LOSSES") == tuple(LOSSES)
    with pytest.raises(LookupError, match="no table NAMES"):
        names_in_table("radq.models.heads:NAMES")


def test_help_lists_names_from_tables_and_imports_no_torch() -> None:
    code = "import sys, radq.cli as c\ntry: c.main(['train', '-h'])\nfinally: print('torch:', 'torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert f"{{{','.join(HEADS)}}}" in shown
    assert f"{{{','.join(LOSSES)}}}" in shown
    assert "torch: False" in shown


def test_ranges_say_what_they_allow() -> None:
    assert str(Range(1)) == "at least 1"
    assert str(Range(high=5)) == "at most 5"
    assert str(Range(0, 1, without_low=True, without_high=True)) == "more than 0 and less than 1"
    assert str(Range(1, 2000, also=-1)) == "at least 1 and at most 2,000, or -1"
    assert 0 in Range(0)
    assert 0 not in Range(0, without_low=True)
    assert -1 in Range(1, also=-1)
    assert math.nan not in Range(0)


def test_every_number_has_a_range_and_every_default_is_in_it() -> None:
    for kind in (RewardTrainingConfig, ExpertTrainingConfig):
        hints = get_type_hints(kind, include_extras=True)
        free = {"threshold", "label_range"}  # any number
        for option in fields(kind):
            hint = hints[option.name]
            plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            if {int, float} & {plain, *get_args(plain)} and option.name not in free:
                assert any(isinstance(part, Range) for part in get_args(hint)), option.name
        kind(data=["a"], labels="a", backbone="b", out="c").check()


# --- what is left to transformers ---


def config(**changes: Any) -> RewardTrainingConfig:
    return RewardTrainingConfig(data=["a"], labels="a", backbone="b", out="c", **changes)


@pytest.mark.parametrize("name", [*MANAGED, *FIXED])
def test_what_radq_decides_is_not_decided_by_the_trainer(name: str) -> None:
    with pytest.raises(OptionError, match=f"trainer sets '{name}'"):
        make_arguments(config(trainer={name: 9}), False, False)


def test_fields_and_reports_that_do_not_exist_are_named() -> None:
    for changes, message in [
        ({"trainer": {"nonsense": 1}}, "'nonsense', which is no field"),
        ({"trainer": {"lr_scheduler_type": "square"}}, "refuses these settings: square"),
        ({"trainer": {"dataloader_num_workers": "two", "dataloader_prefetch_factor": []}}, "refuses|trainer"),
        ({"report_to": "wandb"}, "report_to must be one of none.*got 'wandb'"),
        ({"report_to": "nowhere"}, "report_to must be .*got 'nowhere'"),
    ]:
        with pytest.raises(OptionError, match=message):
            make_arguments(replace(config(**changes), **PAPER), False, False)
    settings = replace(config(micro_batch_size=30, trainer={"optim": "adafactor"}), **PAPER)
    made = make_arguments(settings, False, False)
    assert (made.gradient_accumulation_steps, made.optim) == (4, "adafactor")


def test_half_precision_follows_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_precision("auto", "cpu") == "float32"
    assert choose_precision("bfloat16", "cpu") == "bfloat16"
    with pytest.raises(OptionError, match="no GPU"):
        choose_precision("float16", "cpu")
    for capability, precision in {(9, 0): "bfloat16", (8, 0): "bfloat16", (7, 5): "float16"}.items():
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda capability=capability: capability)
        assert choose_precision("auto", "cuda") == precision
        assert choose_precision("float32", "cuda") == "float32"
    monkeypatch.setattr("torch.version.hip", "6.0")
    assert choose_precision("auto", "cuda") == "bfloat16"
    monkeypatch.setattr("torch.xpu.is_bf16_supported", lambda: True)
    assert choose_precision("auto", "xpu") == "bfloat16"
    monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda *version: False)
    assert choose_precision("auto", "mps") == "float16"


# --- anything that can be typed ---


NUMBERS = ["nan", "inf", "-1", "0", "1", "2", "3.5", "1e400", "1e-320", "-3", "99999999999999999999", "1e39"]
WORDS = ["", " ", "text", "praise", ",", "none", "wandb", "/dev/null", "a\0b", "x" * 300, "§", "None", "true", "../"]
ANYTHING = st.one_of(st.sampled_from(NUMBERS + WORDS), st.text(string.printable, max_size=8))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, calm_toy: Path) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    RadV.from_backbone(calm_toy, attributes=["praise"]).save_pretrained(folder / "teacher")
    pandas.DataFrame(make_reviews(6), columns=["text", "praise"]).to_csv(folder / "rows.csv", index=False)
    return folder


def option_names(command: str) -> list[str]:
    names = [option.name for option in fields(COMMANDS[command]) if option.name != "trainer"]
    return [f"--{name.replace('_', '-')}" for name in [*names, "config", "resume", "overwrite"]]


def typed(command: str, place: Path, calm_toy: Path, more: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a short run with some options that come last, and so count."""
    monkeypatch.chdir(place)
    argv = ["--data", "rows.csv", "--labels", "praise", "--backbone", str(calm_toy), "--out", "run", "--cache", "cache"]
    argv += ["--max-steps", "1", "--overwrite", "--json", *(["--teacher", "teacher"] if command == "distill" else [])]
    try:
        return main([command, *argv, *more])
    except SystemExit as stopped:  # of the parser
        return int(stopped.code or 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_that_is_typed_ends_in_a_traceback(
    command: str, place: Path, calm_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.sampled_from(option_names(command)), ANYTHING)
    def check(name: str, value: str) -> None:
        assert typed(command, place, calm_toy, [f"{name}={value}"], monkeypatch) in (0, 2)

    check()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_that_yaml_holds_ends_in_a_traceback(
    command: str, place: Path, calm_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = st.recursive(
        st.sampled_from(["1", "-1", "0.5", ".nan", "null", "true", "text", "1e-5", "''"]),
        lambda inner: st.one_of(inner.map("[{}]".format), inner.map("{{a: {}}}".format)),
        max_leaves=2,
    )
    names = [option.name for option in fields(COMMANDS[command])]

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.sampled_from(names), values)
    def check(name: str, value: str) -> None:
        (place / "settings.yaml").write_text(f"{name}: {value}\n")
        assert typed(command, place, calm_toy, ["--config", "settings.yaml"], monkeypatch) in (0, 2)

    check()
