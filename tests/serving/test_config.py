from pathlib import Path

import pytest

from radq.errors import OptionError, RadqError
from radq.serving.config import GuideEntry, ServeConfig


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
        ("{", "cannot read"),
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
