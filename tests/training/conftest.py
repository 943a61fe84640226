"""A table of reviews, and settings of a training on it."""

from pathlib import Path

import pytest
from training_runs import SMALL, write_reviews

from radq.training.config import RewardTrainingConfig


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reviews(tmp_path_factory.mktemp("data") / "reviews.csv", 200)


@pytest.fixture
def settings(reviews: Path, calm_toy: Path, tmp_path: Path) -> RewardTrainingConfig:
    return RewardTrainingConfig(
        recipe="paper",
        data=[str(reviews)],
        labels="praise",
        backbone=str(calm_toy),
        out=str(tmp_path / "run"),
        cache=str(tmp_path / "cache"),
        **SMALL,
    )
