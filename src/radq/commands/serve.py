"""radq serve: an OpenAI-compatible server and a page, in which clients steer each request."""

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from radq.commands.console import announce, print_json
from radq.errors import OptionError, require_package
from radq.registry.config import ServeConfig
from radq.settings import Range

API_KEY = "RADQ_API_KEY"


@dataclass
class Arguments:
    """Serve a language model over HTTP, with OpenAI's interface, and a page at /. Each request says how strongly it is
    steered. Without a file, the embedded model is served with both embedded reward models."""

    config: Annotated[Path | None, tyro.conf.Positional] = None
    """YAML file of the operator: base, guides with their ranges and defaults, virtual models, limits, connections and
    hosts."""
    base: str | None = None
    """Language model to serve, in place of the file's: a hub name, a folder, or embedded."""
    host: str = "127.0.0.1"
    """Address to listen at. Other computers reach the server at 0.0.0.0; set RADQ_API_KEY then, and list the names of
    this computer as hosts in the file."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port to listen at; 0 takes a free one."""
    device: str | None = None
    """cpu, cuda, cuda:1, …, in place of the file's; auto uses a GPU if there is one."""
    dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16"] | None = None
    """Data type of all models, in place of the file's; fastest tries data types and numbers of threads for a second."""
    check: bool = False
    """Only check the file and the models it names, and end; no weights are read. It may be vLLM's."""
    max_model_len: int | None = None
    """With --check, the most tokens of a text in vLLM."""
    json: bool = False
    """Print the address, or the result of --check, as JSON."""


def run(arguments: Arguments) -> None:
    config = _read(arguments)
    config.check()
    if arguments.check:
        _print_check(config, arguments)
        return
    _check_port(arguments)
    announce(f"loading {' and '.join([config.base, *config.guides])}", arguments.json)
    from radq.registry.loaded_guides import Served
    from radq.serving.app import make_app
    from radq.serving.listener import Listener

    app = make_app(Served(config), os.environ.get(API_KEY) or None, arguments.host)
    Listener(app, arguments.host, arguments.port, lambda address: _print_address(address, arguments)).run()


def _read(arguments: Arguments) -> ServeConfig:
    if not arguments.check:
        for package in ("fastapi", "uvicorn", "prometheus_client"):
            require_package(package, "serve")
    given = {name: getattr(arguments, name) for name in ("base", "device", "dtype")}
    config = ServeConfig.embedded(arguments.base) if arguments.config is None else ServeConfig.read(arguments.config)
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def _check_port(arguments: Arguments) -> None:
    """Refuse a port that is taken, before models are loaded."""
    family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    try:
        with socket.create_server((arguments.host, arguments.port), family=family):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(
            f"cannot listen at {arguments.host}:{arguments.port}: {reason}.", "give another --port or --host."
        ) from error


def _print_check(config: ServeConfig, arguments: Arguments) -> None:
    """Compare the guides with the base model by their files alone, and print what was found."""
    from radq.registry.loaded_guides import check_guides

    lines = check_guides(config, arguments.max_model_len)
    if arguments.json:
        print_json({"base": config.base_id, "guides": list(config.guides), "models": list(config.models)})
        return
    print(f"base {config.base_id}")
    for line in lines:
        print(f"guide {line}")
    for name, strengths in config.models.items():
        print(f"model {name}: {', '.join(f'{guide}={number}' for guide, number in strengths.items())}")


def _print_address(address: str, arguments: Arguments) -> None:
    if arguments.json:
        print_json({"address": address})
    else:
        print(f"radq serves at {address} — the page is there, the API at {address}/v1. Ctrl-C ends it.", flush=True)
