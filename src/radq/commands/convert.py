"""radq convert CHECKPOINT OUT --backbone gpt2"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from radq.commands.console import announce, print_json
from radq.files import require_own_folder
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import ModelSource, holds_reward_model
from radq.training.config import LossName


@dataclass
class Arguments:
    """Convert weights of the public RAD and rad-q code into a reward model."""

    checkpoint: tyro.conf.Positional[Path]
    """Weight file, or a folder with pytorch_model.bin or model.safetensors."""
    out: tyro.conf.Positional[Path]
    """Folder to write the reward model to."""
    backbone: str
    """Language model that the checkpoint was trained from: a hub name, or a folder with at least config.json."""
    attributes: Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME,…")] = None
    """Names of the outputs; by default the attributes of Jigsaw if there are seven outputs."""
    loss: LossName = "mse"
    """Loss that the checkpoint was trained with. With ce, rewards are the sigmoid of the outputs."""
    prepend_bos: bool | None = None
    """Whether the reward model reads a BOS token before a text; by default no for RAD and yes for rad-q."""
    overwrite: bool = False
    """Replace a reward model that the folder holds already."""
    json: bool = False
    """Print the result as JSON."""


def run(arguments: Arguments) -> None:
    require_own_folder(arguments.out, holds_reward_model, "a reward model", arguments.overwrite)
    if arguments.backbone != EMBEDDED:
        _ = ModelSource.find(arguments.backbone).config  # refused if there is none
    announce(f"converting {arguments.checkpoint}", arguments.json)
    from radq.models.convert import convert

    attributes = None if arguments.attributes is None else [name.strip() for name in arguments.attributes.split(",")]
    model = convert(arguments.checkpoint, arguments.backbone, attributes, arguments.loss, arguments.prepend_bos)
    model.save_pretrained(arguments.out)
    kind = type(model).__name__
    if arguments.json:
        print_json({"out": str(arguments.out), "kind": kind, "attributes": model.config.attributes})
        return
    print(f"{kind} with {', '.join(model.config.attributes)} → {arguments.out}")
    if model.tokenizer is None:
        print(f"note: {arguments.backbone!r} has no tokenizer, so radq can compare only the sizes of vocabularies.")
