"""radq convert CHECKPOINT OUT --backbone gpt2"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass
class Arguments:
    """Turn weights of the public RAD and rad-q code into a reward model folder."""

    checkpoint: tyro.conf.Positional[Path]
    """Weight file, or the folder with pytorch_model.bin or model.safetensors."""
    out: tyro.conf.Positional[Path]
    """Folder to write."""
    backbone: str
    """The language model it was trained from: hub name or folder; a folder with config.json is enough."""
    attributes: Annotated[str | None, tyro.conf.arg(metavar="NAME,NAME,…")] = None
    """Names of the outputs; by default those of Jigsaw if there are seven."""
    loss: Literal["mse", "ce"] = "mse"
    """What it was trained with; ce outputs pass through a sigmoid."""
    prepend_bos: bool | None = None
    """Whether the reward model sees a BOS; by default as the public code has it: RAD no, rad-q yes."""
    overwrite: bool = False
    """Replace the reward model in a folder that holds one."""
    json: bool = False
    """Print JSON."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import print_json
    from radq.errors import OptionError
    from radq.files import require_own_folder
    from radq.models.convert import convert, holds_reward_model

    require_own_folder(arguments.out, holds_reward_model, "a reward model")
    if arguments.out.exists() and not arguments.overwrite:
        raise OptionError(f"{str(arguments.out)!r} exists.", "choose another folder, or pass --overwrite.")
    attributes = None if arguments.attributes is None else [name.strip() for name in arguments.attributes.split(",")]
    model = convert(arguments.checkpoint, arguments.backbone, attributes, arguments.loss, arguments.prepend_bos)
    model.save_pretrained(arguments.out)
    kind = type(model).__name__
    if arguments.json:
        print_json({"out": str(arguments.out), "kind": kind, "attributes": model.config.attributes})
        return
    print(f"{kind} with {', '.join(model.config.attributes)} → {arguments.out}")
    if model.tokenizer is None:
        print(f"note: {arguments.backbone!r} has no tokenizer, so only vocabulary sizes can be compared.")
