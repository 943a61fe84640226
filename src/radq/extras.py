"""Packages that come with an extra of radq, and what to install where one is missing."""

import importlib
from typing import Any

from radq.errors import ModelError


def need(module: str, extra: str) -> Any:
    """The module, or an error that names the extra it comes with."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(
            f"this needs the package {error.name or module}, which is not installed.", f"pip install 'radq[{extra}]'."
        ) from error
