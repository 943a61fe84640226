"""Fixtures for all tests. Shapes and types of radq's signatures are checked while the tests run, and only then."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
if not os.environ.get("RADQ_TEST_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # most tests compare numbers of CPUs, and some fork, which CUDA forbids
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch comes, as the command line does
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # the models are tiny, and `make test` runs several workers; subprocesses inherit it

from jaxtyping import install_import_hook

install_import_hook("radq", "checker.check")

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import FAMILIES, make_lm
from hypothesis import settings
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from radq.sources.hub import quiet
from radq.toy import make_toy

torch.set_num_threads(1)
settings.register_profile("radq", deadline=None, max_examples=50)  # a busy machine is no failure
settings.load_profile("radq")

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def shared_file() -> Callable[[str], Path]:
    """Find a file or folder of the data beside the repository, such as "data/sentiment/sst2_train.tsv.gz", or skip."""
    folder = Path(os.environ.get("RADQ_SHARED") or REPOSITORY.parent / "shared")

    def find(name: str) -> Path:
        if not (folder / name).exists():
            pytest.skip(f"{name} is not in {folder}; set RADQ_SHARED to the folder that holds it")
        return folder / name

    return find


@pytest.fixture(scope="session")
def excerpts() -> Path:
    """The folder with 50 rows in the form of each public data set: tests/excerpts/README.md describes them."""
    return REPOSITORY / "tests" / "excerpts"


@pytest.fixture(scope="session")
def lm_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random language model of every family, with a padded vocabulary and no tokenizer."""
    folder = tmp_path_factory.mktemp("families")
    with quiet():
        for family in FAMILIES:
            make_lm(family).save_pretrained(folder / family)
    return {family: folder / family for family in FAMILIES}


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy language model of film reviews, with its tokenizer."""
    return make_toy(tmp_path_factory.mktemp("toy"), steps=60)


@pytest.fixture(scope="session")
def calm_toy(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy without dropout, so that runs which differ in batches can be compared number by number."""
    folder = tmp_path_factory.mktemp("calm") / "toy"
    shutil.copytree(toy, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def toy_lm(toy: Path) -> PreTrainedModel:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(toy).eval()


@pytest.fixture(scope="session")
def toy_tokenizer(toy: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(toy)
