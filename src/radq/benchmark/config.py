"""Settings of `radq bench`: shapes of well-known models, and the points at which it measures.

Random weights of the same shape take as long as the real ones, and need no download. Importing this module imports no
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

from radq.decoding.config import DEFAULT_KL_BUDGET, read_budget
from radq.errors import OptionError
from radq.files import require_own_folder
from radq.settings import COUNT, Range, check_values, names_in_table
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import ModelSource, check_language_model, check_reward_model

UNGUIDED = "none"
DOCUMENT = "bench.json"
GUIDE_NAMES = names_in_table("radq.benchmark.guides:GUIDES")


@dataclass(frozen=True)
class Point:
    """One place of measurement."""

    rows: int
    top_k: int | None  # None: the whole vocabulary
    prompt_tokens: int
    kl_budget: float | None = None


@dataclass(frozen=True, kw_only=True)
class Variant(Point):
    """A guide at a point, with steps that run one operation after the other or as captured CUDA graphs."""

    guide: str
    captured: bool


@dataclass(frozen=True)
class Grid:
    """The numbers to measure at. The first of each list is the reference for the other lists."""

    top_k: tuple[int, ...]  # 0: the whole vocabulary
    rows: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    new_tokens: int
    kl_budget: float | None = None

    @property
    def points(self) -> list[Point]:
        """Three lines through the point of all references: over the candidates, the rows and the prompt's tokens."""
        k, rows, width = self.top_k[0], self.rows[0], self.prompt_tokens[0]
        lines = [(rows, each, width) for each in self.top_k]
        lines += [(each, k, width) for each in self.rows]
        lines += [(rows, k, each) for each in self.prompt_tokens]
        return [Point(rows, k or None, width, self.kl_budget) for rows, k, width in dict.fromkeys(lines)]


DEFAULTS = {  # by the kind of device
    "cpu": Grid(top_k=(20, 5, 100, 0), rows=(1, 4), prompt_tokens=(32,), new_tokens=3),
    "gpu": Grid(top_k=(20, 5, 100, 1000, 0), rows=(25, 1, 100, 400), prompt_tokens=(32, 512), new_tokens=16),
}
# Measurements with more candidates would take too long: of all rows together where RAD-V reads siblings, and of a row
# where each candidate is a forward of its own.
MOST_SIBLINGS = {"cpu": 2_000, "gpu": 200_000}
MOST_FORWARDS = {"cpu": 20, "gpu": 100}


@dataclass
class BenchConfig:
    """Settings of a benchmark."""

    lm: str = EMBEDDED
    """Language model: embedded, a folder, a hub name, or one of these shapes with random weights, which need no
    download: gpt2-large, smollm2, llama-7b."""
    reward: str | None = None
    """Reward model: a folder, a hub name, or embedded:sentiment. By default one with random weights: of GPT-2-small's
    shape for gpt2-large, of TinyLlama's for llama-7b, otherwise of the language model's first layers, two fifths of
    them. The other guides have this shape, too, and random weights."""
    guides: list[str] = field(default_factory=lambda: list(GUIDE_NAMES))
    """Guides to measure: q (RAD-Q), v (RAD-V), dexperts, gedi, naive-q (RAD-Q that scores the whole vocabulary and then
    picks the candidates) and naive-v (RAD-V with a forward for every candidate). none, decoding without a guide, is
    always measured."""
    top_k: list[Annotated[int, Range(0)]] = field(default_factory=list)
    """Numbers of candidates k; 0 takes the whole vocabulary. The first number is the reference, with which the other
    rows and prompts are measured. By default 20 5 100 0, and on a GPU also 1000."""
    rows: list[Annotated[int, COUNT]] = field(default_factory=list)
    """Numbers of texts that are decoded together, the reference first. By default 1 4, and on a GPU 25 1 100 400."""
    prompt_tokens: list[Annotated[int, COUNT]] = field(default_factory=list)
    """Numbers of tokens of the prompt, the reference first. By default 32, and on a GPU also 512."""
    kl_budget: Annotated[float, Range(0, 1_000_000)] | Literal["none"] = DEFAULT_KL_BUDGET
    """KL budget of guided decoding, in nats per token; none is no budget. The default is that of radq generate."""
    new_tokens: Annotated[int, COUNT] | None = None
    """Number of tokens over which the time of one measurement is taken. By default 3, and on a GPU 16."""
    rounds: Annotated[int, Range(1, 1000)] = 3
    """Number of measurements of each variant. All variants take turns in each round."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of all models; auto uses that of the language model's files, and for random weights float32 on a CPU
    and bfloat16 on a GPU."""

    def check(self) -> None:
        """Refuse wrong values, and models that are not there, before anything is loaded."""
        check_values(BenchConfig(**{option.name: getattr(self, option.name) for option in fields(BenchConfig)}))
        for name in self.guides:
            if name not in GUIDE_NAMES:
                raise OptionError(f"there is no guide {name!r}.", f"choose from {', '.join(GUIDE_NAMES)}.")
        if self.lm not in SHAPES:
            check_language_model(self.lm)
        if self.reward is not None:
            check_reward_model(self.reward)
        check_candidates(self.top_k, self._stored_vocab_size)

    @property
    def _stored_vocab_size(self) -> int | None:
        """The size of the language model's vocabulary, where it is known without loading the model."""
        if self.lm in SHAPES or self.lm == EMBEDDED:
            return SHAPES["smollm2" if self.lm == EMBEDDED else self.lm].vocab_size
        size = ModelSource.find(self.lm).config.get("vocab_size")
        return size if isinstance(size, int) else None

    def choose_grid(self, device: str, vocab_size: int) -> Grid:
        """The numbers that were given, and those of the device where none were."""
        check_candidates(self.top_k, vocab_size)
        default = DEFAULTS[kind_of(device)]
        return Grid(
            tuple(dict.fromkeys(self.top_k)) or tuple(k for k in default.top_k if k <= vocab_size),
            tuple(dict.fromkeys(self.rows)) or default.rows,
            tuple(dict.fromkeys(self.prompt_tokens)) or default.prompt_tokens,
            self.new_tokens or default.new_tokens,
            read_budget(self.kl_budget),
        )


def kind_of(device: str) -> Literal["cpu", "gpu"]:
    return "cpu" if device.startswith("cpu") else "gpu"


def check_candidates(top_k: list[int], vocab_size: int | None) -> None:
    """Refuse more candidates than there are tokens."""
    for k in top_k:
        if vocab_size is not None and k > vocab_size:
            raise OptionError(
                f"top_k must be at most {vocab_size}, the size of the vocabulary, got {k}.",
                "0 takes the whole vocabulary.",
            )


def why_left_out(variant: Variant, vocab_size: int, device: str) -> str | None:
    """The reason why a variant is not measured; None if it is."""
    forwards = variant.top_k or vocab_size
    siblings, kind = forwards * variant.rows, kind_of(device)
    if variant.guide == "naive-v" and forwards > MOST_FORWARDS[kind]:
        return f"a step would take {forwards:,} forwards, and more than {MOST_FORWARDS[kind]:,} are not measured"
    if variant.guide == "v" and siblings > MOST_SIBLINGS[kind]:
        return f"a step would read {siblings:,} candidates, and more than {MOST_SIBLINGS[kind]:,} are not measured"
    return None


def check_folder(folder: Path) -> None:
    """Refuse to write results into a file, or into a folder with other files."""
    require_own_folder(folder, lambda folder: (folder / DOCUMENT).is_file(), "a folder of radq bench")


@dataclass(frozen=True)
class Shape:
    """A language model and the reward model that steers it, as fields of their configurations."""

    family: str  # the name of the architecture in transformers
    shared: Mapping[str, int | bool]  # fields of both models
    lm: Mapping[str, int]
    reward: Mapping[str, int]

    @property
    def vocab_size(self) -> int:
        return self.shared["vocab_size"]


SHAPES = {
    # GPT-2-Large, steered by a reward model over GPT-2-small
    "gpt2-large": Shape(
        "gpt2",
        {"vocab_size": 50257, "n_positions": 1024},
        {"n_embd": 1280, "n_layer": 36, "n_head": 20},
        {"n_embd": 768, "n_layer": 12, "n_head": 12},
    ),
    # SmolLM2-135M, steered by a reward model over its first 12 layers
    "smollm2": Shape(
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        {"num_hidden_layers": 30},
        {"num_hidden_layers": 12},
    ),
    # LLaMA-7B, steered by a reward model over TinyLlama
    "llama-7b": Shape(
        "llama",
        {"vocab_size": 32000, "num_attention_heads": 32, "tie_word_embeddings": False},
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
        },
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
        },
    ),
}
