"""The guidance that a client of a serving engine asks for, in the arguments of its request.

    {"radq": "sentiment=20,toxicity=-50,kl_budget=0.5,top_k=20"}
    {"radq_guide": "toxicity", "radq_beta": -50.0, "radq_top_k": 20, "radq_top_p": 0.9, "radq_kl_budget": 0.5}

Both name guides that the operator of the server has registered (see `radq.registry.config`). A client cannot name
files. Importing this module imports no torch.
"""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from radq.errors import OptionError, RadqError
from radq.models.calibration import is_strength
from radq.registry.config import ServeConfig
from radq.registry.strengths import Guidance, read_pairs, shorten, to_number

LOGGER = logging.getLogger("vllm.radq")  # vLLM shows what its own loggers write
PREFIX = "radq"
ARGUMENTS = ("radq", "radq_guide", "radq_beta", "radq_top_k", "radq_top_p", "radq_kl_budget")
TICKET = "radq_ticket"  # under which the server asks for figures about the request
SEED = "radq_seed"  # of the first choice of a request with several; engines add their numbers to it
OWN_ARGUMENTS = (TICKET, SEED)  # which the server's middleware adds
GUIDES = "RADQ_GUIDES"  # an environment variable, since an engine's processes share nothing else before they start
GREEDY_BELOW = 1e-5  # below this temperature, engines take the best token

_read_file = lru_cache(ServeConfig.read)


def find_config(path: str | None = None) -> ServeConfig:
    """Read the operator's file, by default the one that the environment variable names."""
    path = path or os.environ.get(GUIDES)
    if not path:
        raise OptionError(
            f"the environment variable {GUIDES} is not set.",
            "set it to a YAML file with lines name: DIR:attribute=beta.",
        )
    return _read_file(path)


def find_config_for_client(path: str | None = None) -> ServeConfig:
    """Read the file as `find_config` does, with an error that names no file of the server."""
    try:
        return find_config(path)
    except RadqError as error:
        LOGGER.error("radq: %s", error)
        raise OptionError("the server cannot read its guides.", "tell its operator.") from None


def read_guidance(config: ServeConfig, arguments: Mapping[str, Any] | None, temperature: float) -> Guidance | None:
    """Read and check what a request's arguments ask for; None if it is not guided.

    Guides with a strength of 0 are read only if the answer has details, which include their rewards.
    """
    arguments = arguments or {}
    given = {
        name: value
        for name, value in arguments.items()
        if name.lower().startswith(PREFIX) and name not in OWN_ARGUMENTS
    }
    unknown = [name for name in given if name not in ARGUMENTS]
    if unknown:
        raise OptionError(f"there is no argument {unknown[0]!r}.", f"choose from {', '.join(ARGUMENTS)}.")
    asked = _read_strengths(config, given)
    if not given and not any(entry.default for entry in config.guides.values()):
        return None
    top_p = _read_number(given.get("radq_top_p"), "radq_top_p")
    guidance = config.guidance(asked, 0.0 if temperature < GREEDY_BELOW else temperature, top_p)
    if guidance.details and TICKET not in arguments:
        raise OptionError(
            "this server tells no details.",
            "leave them out, or let its operator add --middleware radq.hosts.vllm_http.GuideMiddleware.",
        )
    strengths = {name: beta for name, beta in guidance.strengths.items() if beta or guidance.details}
    return replace(guidance, strengths=strengths)


def describe_guidance(guidance: Guidance) -> dict[str, Any]:
    """Describe the strengths and settings that are applied to a request, for its answer."""
    notes = {"notes": list(guidance.notes)} if guidance.notes else {}
    return guidance.describe("vllm") | {"top_p": guidance.steering.top_p} | notes


def _read_strengths(config: ServeConfig, given: Mapping[str, Any]) -> dict[str, float | None]:
    """Read the strengths of the guides that are named, and top_k, kl_budget and details."""
    single = "radq_guide" in given or "radq_beta" in given
    if "radq" in given and single:
        raise OptionError("a request has both radq and radq_guide.", "give radq alone: it names several guides.")
    asked = _read_single(config, given) if single else read_pairs(given.get("radq", {}))
    for name in ("top_k", "kl_budget"):
        if f"radq_{name}" in given:
            if name in asked:
                raise OptionError(f"a request gives {name} twice.", f"leave radq_{name} out.")
            asked[name] = given[f"radq_{name}"]
    return config.read_strengths(asked)


def _read_single(config: ServeConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    name, beta = given.get("radq_guide"), given.get("radq_beta")
    if not isinstance(name, str) or name not in config.guides:
        raise OptionError(
            f"there is no guide {shorten(name)}.", f"the registered guides are {', '.join(config.guides) or 'none'}."
        )
    beta = beta[0] if isinstance(beta, list) and len(beta) == 1 else beta
    if not is_strength(beta):
        beta = _read_number(beta, "radq_beta")
    return {name: True if beta is None else beta}


def _read_number(value: Any, name: str) -> float | None:
    """Read a number, which some clients can only send as a text."""
    if value is None:
        return None
    number = to_number(value)
    if not math.isfinite(number):
        raise OptionError(f"{name} must be a number, got {shorten(value)}.", "leave it out for the default.")
    return number
