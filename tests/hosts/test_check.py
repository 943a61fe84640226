"""The check of an operator's file: what a server would stumble over after minutes, in seconds."""

from pathlib import Path

import pytest
from families import make_reward
from vllm_world import World

from radq.errors import ContextLengthError, OptionError, UnknownAttributeError, VocabularyError
from radq.hosts.check import check_guides


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("llama", tmp_path_factory.mktemp("check"))


def write(folder: Path, text: str) -> Path:
    path = folder / "guides.yaml"
    path.write_text(text)
    return path


def test_guides_that_fit_are_described(world: World, tmp_path: Path) -> None:
    folder = world.guides["q"].partition(":")[0]
    file = write(tmp_path, f"good: {folder}:nice=4\nbad: {{guide: '{folder}:rude', range: [-9, 0]}}")
    found = check_guides(file, str(world.base), 63)
    assert found == ["good: nice, strengths from -100 to 100", "bad: rude, strengths from -9 to 0"]


def test_mistakes_are_found_with_the_name_of_the_guide(
    world: World, lm_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = world.guides["q"].partition(":")[0]
    good = write(tmp_path, f"good: {folder}:nice=4")
    with pytest.raises(ContextLengthError, match="the guide 'good': .*hint: give vLLM --max-model-len 63"):
        check_guides(good, str(world.base), 64)
    with pytest.raises(OptionError, match="names no guides"):
        check_guides(write(tmp_path, "base: embedded"), str(world.base))
    with pytest.raises(UnknownAttributeError, match="the guide 'x': .*'nicer'"):
        check_guides(write(tmp_path, f"x: {folder}:nicer=4"), str(world.base))
    model = make_reward("q", world.base)
    model.config.vocabulary = [37, 37, "another"]
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(VocabularyError, match="the guide 'x': the vocabulary"):
        check_guides(write(tmp_path, f"x: {tmp_path / 'other'}:nice=4"), str(world.base), 63)
