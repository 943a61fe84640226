"""The description of a server, from which the page is made."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from radq.decoding.config import DEFAULT_KL_BUDGET
from radq.serving.config import ServeConfig
from radq.sources.embedded import EMBEDDED, HUB_NAME

VERSION = version("radq")
Ranges = Mapping[str, Sequence[float] | None]  # lowest and highest reward of each guide


def describe_server(
    config: ServeConfig, base: str, ranges: Ranges, context: int, *, chat: bool, needs_key: bool
) -> dict[str, Any]:
    """Describe a server: its models, guides, defaults and limits.

    Args:
        base: the name of the base model for clients.
        ranges: the lowest and highest reward of each guide; None for one without a reward model.
        context: the most tokens of a text.
        chat: whether the base model has a chat template.
    """
    attributes = {
        name: {
            "range": entry.limits,
            "default": entry.default,
            "suggested": entry.suggested,
            "safe": entry.safe,
            "strengths": config.calibrations[name].named if name in config.calibrations else {},
            "rewards": ranges[name],
            "description": entry.description,
        }
        for name, entry in config.guides.items()
    }
    virtual = [{"id": name, "radq": strengths} for name, strengths in config.models.items()]
    return {
        "version": VERSION,
        "base": base,
        "title": HUB_NAME.rpartition("/")[2] if base == EMBEDDED else base,
        "chat": chat,
        "context": context,
        "needs_key": needs_key,
        "attributes": attributes,
        "models": [{"id": base, "radq": {}}, *virtual],
        "defaults": vars(config.defaults),
        "usual_kl_budget": DEFAULT_KL_BUDGET,  # where a client turns the budget on that the operator has turned off
        "limits": vars(config.limits),
    }
