"""Calibrations in model folders, and strengths as users write them."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import BY_KL, PRAISE
from families import make_lm
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase
from word_judge import GoodWords

import radq
from radq.errors import ModelError, OptionError, UnknownAttributeError
from radq.guides.spec import GuideSpec, find_base, find_budget, load_guide
from radq.models.calibration import (
    CALIBRATION,
    Setting,
    StrengthPoint,
    find_calibration,
    find_setting,
    is_strength,
    note_share,
    read_calibrations,
    write_calibration,
)
from radq.models.kinds import RadQ
from radq.models.loading import load_causal_lm
from radq.registry.strengths import read_strengths
from radq.sources.embedded import CONVERTED, embedded_rewards, reward_folder
from radq.sources.model_source import ModelSource, fingerprint_weights_in


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for one in (PRAISE, BY_KL):
        write_calibration(tmp_path, one)
    return tmp_path


def test_a_strength_lies_on_the_lines_between_the_points() -> None:
    assert [PRAISE.at(share).beta for share in (0, 0.25, 0.5, 0.75, 1)] == [0, -5, -10, -20, -30]
    assert PRAISE.safe == (-30, 0)
    assert PRAISE.named == {"weak": -6.6, "medium": -16.8, "strong": -30}
    assert BY_KL.at(0.5) == Setting(100, 0.4)
    assert BY_KL.at(0).beta == 0
    assert BY_KL.safe is None


@pytest.mark.parametrize(
    ("text", "beta"),
    [
        ("strong", -30),
        ("weak", -6.6),
        ("100%", -30),
        ("50%", -10),
        ("+0.5", 0.5),
        ("-0.5", -0.5),
        ("0", 0),
        ("1.5", 1.5),
        ("-30", -30),
        ("0%", 0),
    ],
)
def test_words_and_percentages_are_strengths(model: Path, text: str, beta: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guide = GuideSpec.parse(f"{model}:praise={text}")
    assert (guide.folder, guide.numbers) == (str(model), {"praise": pytest.approx(beta)})


@pytest.mark.parametrize(("text", "share"), [("0.5", "50%"), ("1", "100%"), ("1.0", "100%"), (".25", "25%")])
def test_a_number_that_looks_like_a_share_is_beta_and_told(model: Path, text: str, share: str) -> None:
    with pytest.warns(UserWarning, match=f"praise={text} is β .* write praise={share}"):
        assert GuideSpec.parse(f"{model}:praise={text}").numbers == {"praise": float(text)}
    assert find_budget(map(GuideSpec.parse, [f"{model}:praise=+{text}"]), 0.7) == 0.7


@given(st.floats(-1e6, 1e6))
def test_a_number_is_beta_whatever_is_calibrated(number: float) -> None:
    """Nothing changes its sign at 1, and a file beside a model changes nothing."""
    assert not is_strength(number)
    assert not is_strength(str(number))
    for written in (number, str(number)):
        assert read_strengths({"praise": written}, {"praise": PRAISE}) == {"praise": number}


def test_a_damaged_calibration_stops_no_number(model: Path) -> None:
    (model / CALIBRATION).write_text("{")
    assert GuideSpec.parse(f"{model}:praise=0.5").numbers == {"praise": 0.5}
    with pytest.raises(ModelError, match="is damaged"):
        GuideSpec.parse(f"{model}:praise=50%")


def test_small_beta_of_a_model_with_small_strengths_is_not_told() -> None:
    small = [replace(point, beta=point.strength) for point in PRAISE.table]
    assert note_share("praise", 0.5, replace(PRAISE, table=small)) is None
    assert note_share("praise", 0.5, None) is None


def test_wrong_strengths(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for text in ("120%", "-5%", "x%", "%"):
        with pytest.raises(OptionError, match="from 0% to 100%"):
            GuideSpec.parse(f"{model}:praise={text}")
    with pytest.raises(OptionError, match="to steer the other way, give β as a number"):
        GuideSpec.parse(f"{model}:praise=-60%")
    with pytest.raises(OptionError, match="no specification.*DIR:attribute=strong"):
        GuideSpec.parse(f"{model}:praise=stronger")
    for folder, name in ((model, "joy"), (tmp_path_factory.mktemp("bare"), "praise")):
        with pytest.raises(OptionError, match="is not calibrated"):
            GuideSpec.parse(f"{folder}:{name}=strong")
    with pytest.raises(UnknownAttributeError, match="no embedded reward model of 'nosuch'"):
        GuideSpec.parse("embedded:nosuch=strong")
    assert GuideSpec.parse(f"{model}:joy=0.5").numbers == {"joy": 0.5}
    assert find_setting(" 50% ", PRAISE, "praise").beta == -10


def test_several_strengths_share_one_budget(model: Path) -> None:
    assert find_budget(map(GuideSpec.parse, [f"{model}:praise=-30"]), 0.7) == 0.7
    assert find_budget(map(GuideSpec.parse, [f"{model}:praise=strong"]), 0.7) == 0.5
    assert find_budget(map(GuideSpec.parse, [f"{model}:praise=strong", f"{model}:calm=strong"]), 0.7) == 0.8
    assert find_budget(map(GuideSpec.parse, [f"{model}:praise=strong,calm=25%"]), None) == 0.5
    assert find_budget(map(GuideSpec.parse, [f"{model}:praise=strong,calm=100"]), 0.7) == 0.7
    free = [replace(point, kl_budget=None) for point in PRAISE.table]
    write_calibration(model, replace(PRAISE, table=free))
    assert find_budget(map(GuideSpec.parse, [f"{model}:praise=strong,calm=strong"]), 0.7) is None


def test_a_calibration_replaces_that_of_the_same_attribute_and_base(model: Path) -> None:
    changed = replace(PRAISE, seed=3)
    write_calibration(model, changed)
    other = replace(PRAISE, base="other", base_fingerprint="y")
    write_calibration(model, other)
    assert read_calibrations(model) == [BY_KL, changed, other]
    assert [file.name for file in model.iterdir()] == [CALIBRATION]


def test_another_base_is_named(model: Path, toy: Path) -> None:
    with pytest.raises(OptionError, match=r"is calibrated over 'toy', not over '.*toy.*'.*radq calibrate"):
        find_calibration(model, "praise", str(toy))
    with pytest.raises(OptionError, match="not over 'toy' as it is now"):
        find_calibration(model, "praise", "toy")
    own = replace(PRAISE, base_fingerprint=ModelSource.find(toy).fingerprint)
    write_calibration(model, own)
    write_calibration(model, replace(PRAISE, seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_calibration(model, "praise", str(toy)) == own


@pytest.fixture(scope="module")
def two_bases(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a calibration over the toy, and a later one over another base model."""
    folder = tmp_path_factory.mktemp("two")
    RadQ.from_backbone(toy, ["praise"]).save_pretrained(folder)
    points = [StrengthPoint(0.0, 0.0, 2.0, 0.2, 1.0), StrengthPoint(1.0, -400.0, 2.0, 0.6, 1.3)]
    write_calibration(folder, replace(PRAISE, base_fingerprint=ModelSource.find(toy).fingerprint))
    write_calibration(folder, replace(PRAISE, base="other", base_fingerprint="y", table=points))
    return folder


def test_other_weights_beside_a_calibration_are_noticed(tmp_path: Path, toy: Path) -> None:
    guide = f"{tmp_path}:praise=strong"
    RadQ.from_backbone(toy, ["praise"]).save_pretrained(tmp_path)
    write_calibration(tmp_path, replace(PRAISE, weights=fingerprint_weights_in(tmp_path)))
    assert GuideSpec.parse(guide).numbers == {"praise": -30}
    weights = load_file(tmp_path / "model.safetensors")
    weights["head.weight"] *= 0.5
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OptionError, match="was calibrated with other weights.*radq calibrate"):
        GuideSpec.parse(guide)
    assert GuideSpec.parse(f"{tmp_path}:praise=-30").numbers == {"praise": -30}
    write_calibration(tmp_path, PRAISE)  # as an older radq wrote it
    assert GuideSpec.parse(guide).numbers == {"praise": -30}


def test_shipped_calibrations_are_those_of_the_shipped_weights() -> None:
    for attribute in embedded_rewards():
        (calibration,) = read_calibrations(reward_folder(attribute))
        assert calibration.weights == fingerprint_weights_in(reward_folder(attribute))


def test_a_language_model_in_memory_has_the_strengths_of_its_base(
    two_bases: Path, toy: Path, lm_folders: dict[str, Path]
) -> None:
    lm = load_causal_lm(toy)
    assert load_guide(f"{two_bases}:praise=strong", lm=lm).beta == (-30,)
    assert find_budget([GuideSpec.parse(f"{two_bases}:praise=strong", find_base(lm))], None) == 0.5
    for other in (load_causal_lm(lm_folders["llama"]), make_lm("llama")):
        with pytest.raises(OptionError, match="calibrated over 'toy' and 'other', not over"):
            load_guide(f"{two_bases}:praise=strong", lm=other)
        assert load_guide(f"{two_bases}:praise=-7", lm=other).beta == (-7,)
    with pytest.warns(UserWarning, match="the strengths over 'other' are taken"):
        assert load_guide(f"{two_bases}:praise=strong").beta == (-400,)


def test_an_evaluation_uses_no_strengths_of_another_base(
    two_bases: Path, toy: Path, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    guides, judges = {"praised": f"{two_bases}:praise=strong"}, {"good": GoodWords()}
    lm: Any = load_causal_lm(toy)
    drawn, by_hand = (
        radq.evaluate(lm, toy_tokenizer, ["the film"], one, judges, max_new_tokens=5, kl_budget=0.5).guides[1].texts
        for one in (guides, {"praised": load_guide(f"{two_bases}:praise=-30")})
    )
    assert drawn == by_hand
    lm.add_adapter(LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(OptionError, match="not over"):
        radq.evaluate(lm, toy_tokenizer, ["the film"], guides, judges, max_new_tokens=5)


def test_the_embedded_base_is_known_by_its_folder_too(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = shutil.copytree(toy, tmp_path / "radq" / f"{CONVERTED}0123456789abcdef")
    assert ModelSource.find(folder).fingerprint == "embedded@0123456789abcdef"
    assert (
        ModelSource.find(shutil.copytree(toy, tmp_path / folder.name)).fingerprint == ModelSource.find(toy).fingerprint
    )


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"calibrations": [{"attribute": "praise"}]}'])
def test_a_damaged_file(tmp_path: Path, text: str) -> None:
    (tmp_path / CALIBRATION).write_text(text)
    with pytest.raises(ModelError, match="is damaged"):
        read_calibrations(tmp_path)


def test_a_table_must_rise_from_0_to_1(model: Path) -> None:
    stored = json.loads((model / CALIBRATION).read_text())
    stored["calibrations"][0]["table"].pop()
    (model / CALIBRATION).write_text(json.dumps(stored))
    with pytest.raises(ModelError, match="from 0 to 1"):
        read_calibrations(model)


def test_new_weights_drop_the_calibration(toy: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    RadQ.from_backbone(toy, attributes=["praise"]).save_pretrained(tmp_path)
    write_calibration(tmp_path, PRAISE)
    RadQ.from_backbone(toy, attributes=["praise"]).save_pretrained(tmp_path)
    assert read_calibrations(tmp_path) == []
