"""The configuration of reward models, as config.json stores it."""

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal, no_type_check

from transformers import AutoConfig, PreTrainedConfig

from radq.errors import OptionError
from radq.sources import MODEL_TYPE
from radq.sources.model_source import Origin

RANGE_HINT = "give (low, high), or one such pair per attribute, with a low that is not above the high."


@no_type_check  # jaxtyping, which checks types in tests, would refuse the other settings of transformers
class RewardModelConfig(PreTrainedConfig):
    """The configuration of a reward model, stored in config.json."""

    model_type = MODEL_TYPE

    kind: Literal["q", "v"] = "q"  # "q" scores next tokens from the prefix, "v" reads each next token as an input
    # Names of what the rewards measure, in the order of their last axis.
    attributes: list[str] = field(default_factory=lambda: ["reward"])
    head: str = "linear"  # name of the head in `radq.models.heads.HEADS`, for kind "q"
    backbone: Any = None  # the configuration of the transformer below the head
    loss: str = "mse"  # of the training; with "ce" the reward is σ of the head's output
    # Range of the training labels, to which guides clamp rewards: (low, high), or one such pair for each attribute.
    response_range: Sequence[float] | Sequence[Sequence[float]] = (0.0, 1.0)
    # How the labels of each attribute became numbers, see `radq.data.label_scale`; None in older models.
    label_scales: Sequence[dict[str, Any]] | None = None
    prepend_bos: bool = True  # whether `bos_token_id` stands before every text that does not begin with it
    bos_token_id: Any = None
    vocabulary: Sequence[Any] | None = None  # size, number of tokens and fingerprint, see `radq.models.vocabulary`
    lora_rank: int = 0  # of the adapters that were trained beside a frozen backbone; 0 without adapters
    readout: dict[str, Any] | None = None  # layers and width, see `radq.models.readout`; None without a readout
    # Where a frozen backbone is found, beside which a folder holds the head and adapters or a readout: `embedded`,
    # a hub name with its commit, or a folder, in config.json relative to the folder of the reward model.
    backbone_name: str | None = None
    backbone_revision: str | None = None
    backbone_fingerprint: str | None = None  # of its weights, see `radq.sources.model_source`

    def __post_init__(self, **kwargs: Any) -> None:
        self.attributes = list(self.attributes)
        if isinstance(self.backbone, dict):
            self.backbone = AutoConfig.for_model(**self.backbone)
        self.response_range = simplify_ranges(self.response_range, len(self.attributes))
        super().__post_init__(**kwargs)

    @property
    def beside_backbone(self) -> bool:
        """Whether the folder holds only what was trained beside a frozen backbone, without the backbone itself."""
        return bool(self.lora_rank or self.readout)

    @property
    def origin(self) -> Origin:
        return Origin(self.backbone_name or "", self.backbone_revision, self.backbone_fingerprint)

    def set_origin(self, origin: Origin) -> None:
        self.backbone_name, self.backbone_revision = origin.name, origin.revision
        self.backbone_fingerprint = origin.fingerprint

    @property
    def attribute_ranges(self) -> list[tuple[float, float]]:
        """The range of the training labels of each attribute."""
        stored: Any = self.response_range
        pairs = stored if isinstance(stored[0], Sequence) else [stored] * len(self.attributes)
        return [(float(low), float(high)) for low, high in pairs]


def simplify_ranges(given: Sequence[float] | Sequence[Sequence[float]], num_attributes: int) -> list[Any]:
    """Return [low, high] if all attributes have one range, else a list with such a pair for each attribute."""
    try:
        if isinstance(given[0], Sequence):
            pairs = [[float(low), float(high)] for low, high in given]  # pyright: ignore[reportGeneralTypeIssues]
        else:
            low, high = given
            pairs = [[float(low), float(high)]] * num_attributes  # pyright: ignore[reportArgumentType]
    except (IndexError, TypeError, ValueError) as error:
        raise OptionError(f"response_range must be one or more pairs of numbers, got {given!r}.", RANGE_HINT) from error
    if len(pairs) != num_attributes or not all(low <= high for low, high in pairs):
        raise OptionError(f"response_range must fit {num_attributes} attributes, got {given!r}.", RANGE_HINT)
    return pairs[0] if all(pair == pairs[0] for pair in pairs) else pairs
