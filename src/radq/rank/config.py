"""Settings of `radq rank`: dataclasses whose docstrings are the help of the command line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from radq.data.tables import check_sources
from radq.errors import OptionError
from radq.settings import COUNT, Range
from radq.sources.model_source import check_language_model, check_reward_model
from radq.training.config import DataConfig

SEED = Range(0, 2**63 - 1)


@dataclass
class DataRankConfig(DataConfig):
    """Say, before training, whether RAD-Q can fit the labels of a data set.

    Prints the ranks that meet the labels beside those that meet shuffled labels, and with --backbone a lower bound of
    the error that its frozen output embedding leaves.
    """

    files: tyro.conf.Positional[list[str]] = field(kw_only=True)
    """csv, tsv, jsonl or parquet files, compressed or not; or one .npz file that --save-matrix has written."""
    tokenizer: str = ""
    """Hub name, tokenizer.json, or folder (also with GPT-2's encoder.json and vocab.bpe); by default the backbone's."""
    backbone: str | None = None
    """Language model whose hidden size and frozen output embedding the verdict is about."""
    ranks: str = ""
    """Ranks to try, separated by commas; by default five ranks up to where an exact fit is likely."""
    eps: Annotated[float, Range(0)] = 1e-6
    """Mean squared error that counts as a fit, over Ω_2: the prefixes with two or more continuations."""
    iterations: Annotated[int, COUNT] = 200
    """Largest number of iterations per rank."""
    penalty: Annotated[float, Range(0, without_low=True)] = 1e-4
    """Weight of the squared factors in the objective of a completion."""
    tolerance: Annotated[float, Range(0)] = 0.01
    """Stop when an iteration lowers the objective by less than this share, unless eps is still in reach."""
    max_length: Annotated[int | None, COUNT] = None
    """Cut texts off after this number of tokens; by default texts stay whole."""
    save_matrix: Path | None = None
    """Write the reward matrix to this npz file, which scipy.sparse.load_npz reads."""
    certificates: Path | None = None
    """Folder for the factors of each rank; existing factors are used as the start."""
    seed: Annotated[int, SEED] = 0
    """Seed of the random start and of the shuffled labels; a matrix file brings its own shuffled labels."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    dtype: Literal["float64", "float32"] = "float64"
    """Data type of the factors."""
    json: bool = False
    """Print the result as JSON, without progress bars."""

    @property
    def reads_matrix(self) -> bool:
        """Whether the reward matrix comes from a file, and not from texts and labels."""
        return len(self.files) == 1 and self.files[0].endswith(".npz")

    @property
    def rank_numbers(self) -> list[int]:
        return _parse_numbers(self.ranks, "ranks")

    def check(self) -> None:
        """Refuse settings that contradict each other, and files and models that are not there, before any is loaded."""
        if self.save_matrix is not None and (not self.save_matrix.name or self.save_matrix.is_dir()):
            raise OptionError(
                f"save_matrix must be a file, got the folder {str(self.save_matrix)!r}.",
                "name a file in it, such as matrix.npz.",
            )
        _ = self.label_rules, self.rank_numbers
        if self.backbone is not None:
            check_language_model(self.backbone)
        if self.reads_matrix:
            return
        if not (self.tokenizer or self.backbone):
            raise OptionError(
                "a tokenizer is needed to read texts.",
                "give --tokenizer, or --backbone to use the tokenizer of a model.",
            )
        labels = self.label_columns
        if not labels or len(set(labels)) < len(labels):
            raise OptionError(
                f"labels must name one column, or different ones, got {self.labels!r}.",
                "give --labels COLUMN, or several columns separated by commas.",
            )
        check_sources(self.files, self.columns)


@dataclass
class ModelRankConfig:
    """Measure the numerical rank of the rewards that a trained model gives."""

    reward: tyro.conf.Positional[str]
    """Folder of the reward model."""
    data: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FILE")] = field(default_factory=list)
    """File with texts to draw prefixes from; repeat the option for more files."""
    text: str = "text"
    """Column with the texts."""
    skip_empty: bool = False
    """Leave out rows with an empty text, which are an error otherwise."""
    attribute: str | None = None
    """Attribute whose rewards are measured; by default the first."""
    rows: str = "64,128,256,512,1024,2048"
    """Numbers of prefixes, separated by commas."""
    batch_size: Annotated[int, COUNT] = 16
    """Number of prefixes that are read together."""
    out: Path | None = None
    """Folder for rank.json and the plots rank.png and spectrum.png."""
    cache: str | None = None
    """Folder for tokenised data; by default in the user's cache folder."""
    seed: Annotated[int, SEED] = 0
    """Seed of the draw of prefixes."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    dtype: Literal["float32", "float64"] = "float32"
    """Data type of the model, which also sets the cutoff of the rank."""
    json: bool = False
    """Print the result as JSON, without progress bars."""

    @property
    def sizes(self) -> list[int]:
        """The numbers of prefixes, smallest first."""
        return sorted(_parse_numbers(self.rows, "rows"))

    def check(self) -> None:
        """Refuse numbers of prefixes that are none, and files and models that are not there, before any is loaded."""
        if not self.sizes or self.sizes[0] < 1:
            raise OptionError(
                f"rows must be numbers of at least 1, got {self.rows!r}.", "give --rows 64,128,256, for example."
            )
        check_reward_model(self.reward, [] if self.attribute is None else [self.attribute])
        if not self.data:
            raise OptionError("there is no data.", "give --data FILE.")
        check_sources(self.data, [self.text])


def _parse_numbers(text: str, option: str) -> list[int]:
    """The whole numbers of a text such as `64,128,256`."""
    try:
        return [int(number) for number in text.split(",")] if text.strip() else []
    except ValueError as error:
        raise OptionError(
            f"{option} must be whole numbers separated by commas, got {text!r}.",
            f"give --{option} 64,128,256, for example.",
        ) from error
