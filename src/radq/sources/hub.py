"""Names of models: folders, and names on the hub. Loading by them, with errors that say what to do.

Importing this module imports neither torch nor transformers, so that a wrong name is refused at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

from safetensors import SafetensorError

from radq.errors import ModelError, first_line

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
HINT = "give a folder with config.json and *.safetensors, or a hub name that is cached or reachable."
SECONDS_TO_ANSWER = 3.0


def looks_like_path(name: str) -> bool:
    """Whether a name cannot be one of the hub, which are written NAME or OWNER/NAME."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def require_source(name: str, cache_dir: str | Path | None = None) -> None:
    """Refuse a name that is no folder, that the cache of the hub does not hold, and that cannot be fetched now."""
    if Path(name).is_dir():
        return
    if Path(name).suffix == ".gguf" and Path(name).is_file():
        raise ModelError(
            f"{name!r} is a GGUF file.",
            "convert it: `from radq.models.gguf import convert_gguf; convert_gguf(FILE, FOLDER)`.",
        )
    if looks_like_path(name):
        raise ModelError(f"there is no folder {name!r}.", HINT)
    from huggingface_hub import constants

    if _is_cached(name, cache_dir):
        return
    if constants.is_offline_mode():
        raise ModelError(
            f"there is no folder {name!r} here, it is not in the cache of the hub, and HF_HUB_OFFLINE is set.", HINT
        )
    if not _hub_answers():
        raise ModelError(f"there is no folder {name!r} here, and the hub {constants.ENDPOINT} cannot be reached.", HINT)


def find_file(name: str, file: str, fetch: bool) -> Path:
    """The place of a file of a hub name in its cache, which may fetch it; an OSError if there is none."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, file)
        return Path(cached if isinstance(cached, str) else hf_hub_download(name, file, local_files_only=not fetch))
    except (OSError, HFValidationError) as error:
        raise _explain(error, name, file) from error


def _is_cached(name: str, cache_dir: str | Path | None) -> bool:
    """Whether any version of a hub name is in the cache; refuse a name that the hub does not allow."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelError(f"there is no folder {name!r}, and the hub has no names like this.", HINT) from error
    folder = Path(cache_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    return any(folder.glob("snapshots/*"))


def _hub_answers() -> bool:
    """Whether the hub answers within seconds. A thread asks, since looking up an address knows no time limit."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    answers: list[Any] = []

    def ask() -> None:
        with suppress(Exception):  # the hub's client raises errors of several libraries
            answers.append(get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_ANSWER))

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS_TO_ANSWER)
    return bool(answers)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' load reports and progress bars inside the block; radq raises what matters in them."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def explained(name: str | Path, what: str) -> Iterator[None]:
    """Turn what transformers raises while loading into one line that names the folder and a way out."""
    try:
        with quiet():
            yield
    except SafetensorError as error:
        raise ModelError(
            f"a weight file in {str(name)!r} is damaged: {error}.", "it may be truncated; copy or download it again."
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise _explain(error, name, what) from error


def _explain(error: Exception, name: str | Path, what: str) -> ModelError:
    reason = first_line(error).rstrip(".:")
    return ModelError(f"cannot load {what} from {str(name)!r}: {reason}.", HINT)
