"""A real server with tiny models, in a thread of the test."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from radq.models.kinds import RadQ, RadV
from radq.registry.config import RequestLimits, ServeConfig
from radq.registry.loaded_guides import Served
from radq.serving.app import Server, make_app
from radq.serving.listener import Listener
from radq.sources.hub import quiet

CHAT = "{% for message in messages %}the {{ message['content'] }} {% endfor %}"


@dataclass(frozen=True)
class Running:
    """A server that listens."""

    address: str
    server: Server

    @property
    def served(self) -> Served:
        return self.server.served


def make_models(folder: Path, toy: Path) -> Path:
    """Write reward models of the toy, and give the toy a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(toy)
    tokenizer.chat_template = CHAT
    with quiet():
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(toy).save_pretrained(folder / "toy")
        tokenizer.save_pretrained(folder / "toy")
        torch.manual_seed(0)
        for name, kind, attributes in (("q", RadQ, ["praise", "calm"]), ("v", RadV, ["length"])):
            model = kind.from_backbone(folder / "toy", attributes=attributes, response_range=(-1.0, 1.0))
            with torch.no_grad():
                for parameter in model.head.parameters():
                    parameter.copy_(torch.randn_like(parameter) * 0.3)
            model.save_pretrained(folder / name)
    return folder


def make_config(folder: Path, **changes: Any) -> ServeConfig:
    """Guides of two folders, one of them with two attributes, and two virtual models."""
    settings: dict[str, Any] = {
        "base": str(folder / "toy"),
        "guides": {
            "praise": f"{folder / 'q'}:praise=10",
            "calm": {"guide": f"{folder / 'q'}:calm", "range": [-50, 50], "suggested": 5},
            "length": f"{folder / 'v'}:length=3",
        },
        "models": {"kind": {"praise": 10}, "mixed": "calm=-5,length=2,kl_budget=0.3"},
        "limits": RequestLimits(prompt_tokens=40, max_tokens=48),
        "device": "cpu",
    }
    return ServeConfig(**settings | changes)


@contextmanager
def serving(
    config: ServeConfig, api_key: str | None = None, address: str = "127.0.0.1", port: int = 0
) -> Iterator[Running]:
    """Serve until the end of the block, on a free port if none is given."""
    app = make_app(Served(config), api_key, address)
    listener = Listener(app, address, port)
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve()), daemon=True)
    thread.start()
    while not listener.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.01)
    try:
        yield Running(listener.address, app.state.server)
    finally:
        listener.should_exit = True
        thread.join()
