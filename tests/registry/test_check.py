"""The check of an operator's file: what a server would stumble over after minutes, in seconds."""

from dataclasses import replace
from pathlib import Path

import pytest
from families import make_reward
from vllm_world import World

from radq.errors import ContextLengthError, UnknownAttributeError, VocabularyError
from radq.registry.config import ServeConfig
from radq.registry.loaded_guides import check_guides


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("llama", tmp_path_factory.mktemp("check"))


def write(folder: Path, text: str) -> Path:
    path = folder / "guides.yaml"
    path.write_text(text)
    return path


def check(file: Path, world: World, max_model_len: int | None = None) -> list[str]:
    return check_guides(replace(ServeConfig.read(file), base=str(world.base)), max_model_len)


def test_guides_that_fit_are_described(world: World, tmp_path: Path) -> None:
    folder = world.guides["q"].partition(":")[0]
    file = write(tmp_path, f"good: {folder}:nice=4\nbad: {{guide: '{folder}:rude', range: [-9, 0]}}")
    found = check(file, world, 63)
    assert found == [
        "good: nice, strengths from -100 to 100, by default 0, texts of up to 63 tokens",
        "bad: rude, strengths from -9 to 0, by default 0, texts of up to 63 tokens",
    ]


def test_mistakes_are_found_with_the_name_of_the_guide(
    world: World, lm_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = world.guides["q"].partition(":")[0]
    good = write(tmp_path, f"good: {folder}:nice=4")
    with pytest.raises(ContextLengthError, match="the guide 'good': .*hint: give --max-model-len 63"):
        check(good, world, 64)
    with pytest.raises(UnknownAttributeError, match="the guide 'x': .*'nicer'"):
        check(write(tmp_path, f"x: {folder}:nicer=4"), world)
    model = make_reward("q", world.base)
    model.config.vocabulary = [37, 37, "another"]
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(VocabularyError, match="the guide 'x': the vocabulary"):
        check(write(tmp_path, f"x: {tmp_path / 'other'}:nice=4"), world, 63)
