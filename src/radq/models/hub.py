"""Transformers' loading by hub name or folder, without its reports and with errors that say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from radq.errors import ModelError

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def find_snapshot(name: str) -> Path:
    """The folder in which the files of a hub name lie; its own name is the commit."""
    with explained(name, "a model configuration"):
        file = cached_file(name, "config.json")
    assert file is not None  # or it had raised
    return Path(file).parent


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' load reports and progress bars inside the block; radq raises what matters in them."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def explained(name: str | Path, what: str) -> Iterator[None]:
    """Turn what transformers raises while loading into one line that names the folder and a way out."""
    hint = "give a folder with config.json and *.safetensors, or a hub name that is cached or reachable."
    if str(name).startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ModelError(f"there is no folder {str(name)!r}.", hint)
    try:
        with quiet():
            yield
    except SafetensorError as error:
        raise ModelError(
            f"a weight file in {str(name)!r} is damaged: {error}.", "it may be truncated; copy or download it again."
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".:") if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot load {what} from {str(name)!r}: {reason}.", hint) from error
