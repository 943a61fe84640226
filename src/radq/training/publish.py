"""Reward models on the hub: a folder with its model card becomes a repository.

push_to_hub("praise", "owner/praise", license="apache-2.0")
RewardModel.from_pretrained("owner/praise")
"""

import warnings
from pathlib import Path
from typing import Any

from radq.errors import ModelError, OptionError, ServerError, first_line
from radq.files import MODEL_FILES
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import ModelSource, check_reward_model
from radq.training.card import write_card

CARD = "README.md"


def push_to_hub(
    folder: str | Path,
    name: str,
    license: str | None = None,  # noqa: A002
    private: bool = False,
    token: str | None = None,
) -> str:
    """Upload a reward model with its card, in one commit, and return the address of the commit.

    Args:
        folder: the folder of a reward model, such as the --out of a run. A README.md in it is the card; otherwise the
            card is written from the run. Checkpoints and other files of the run stay here.
        name: the name on the hub, OWNER/NAME. The repository is made if it does not exist.
        license: the licence, as the hub writes it, such as apache-2.0.
        private: whether a new repository is private.
        token: a token that may write there; by default that of `hf auth login` or of HF_TOKEN.
    """
    folder = Path(folder)
    if name.count("/") != 1:
        raise OptionError(f"the name must be written as OWNER/NAME, got {name!r}.", "put your name before it.")
    if not folder.is_dir():
        raise ModelError(f"there is no folder {str(folder)!r}.", "give the folder of a reward model.")
    check_reward_model(folder)
    _warn_of_local_backbone(folder)
    files: dict[str, Path | bytes] = {file.relative_to(folder).as_posix(): file for file in _find_files(folder)}
    card = folder / CARD
    files[CARD] = card if card.is_file() else write_card(folder, name, license).encode()
    import httpx
    from huggingface_hub import CommitOperationAdd, HfApi

    hub = HfApi(token=token)
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        operations: Any = [CommitOperationAdd(path, contents) for path, contents in files.items()]
        return str(hub.create_commit(name, operations, commit_message="Upload a reward model of radq").commit_url)
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ServerError(
            f"{name!r} cannot be written on the hub {hub.endpoint}: {first_line(error)}.",
            "check the name, the network, and `hf auth login`.",
        ) from error


def _find_files(folder: Path) -> list[Path]:
    """The files of the model in a folder, without those of its run."""
    found = {path for pattern in MODEL_FILES for path in folder.glob(pattern)}
    return sorted(file for path in found for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def _warn_of_local_backbone(folder: Path) -> None:
    stored = ModelSource.find(folder).config
    name, revision = stored.get("backbone_name"), stored.get("backbone_revision")
    if name and name != EMBEDDED and not revision:
        warnings.warn(
            f"the backbone {Path(name).name!r} of this model is a folder, which is not uploaded: others have to name "
            "it by from_pretrained(…, backbone=FOLDER).",
            stacklevel=3,
        )
