"""Names of models: paths are never asked for on the hub, and a hub that does not answer is found out at once."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from radq.errors import ModelError
from radq.models.loading import load_causal_lm
from radq.sources import hub
from radq.sources.hub import looks_like_path, require_source
from radq.sources.model_source import ModelSource, check_language_model


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which may be asked."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A port of this machine that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def endpoint(server: socket.socket) -> str:
    return "http://{}:{}".format(*server.getsockname())


@pytest.mark.parametrize("name", ["./a", "../a", "/a", "~/a", "a/", "a/b/", "a/b/c", ".", ""])
def test_paths_are_never_asked_for(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_hub_answers", lambda: pytest.fail("the hub was asked"))
    if name in (".", ""):
        with pytest.raises(ModelError, match="config.json"):
            _ = ModelSource.find(name).config
        return
    assert looks_like_path(name)
    with pytest.raises(ModelError, match="there is no folder"):
        require_source(name)


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2", "praise-q"])
def test_names_of_the_hub_are_no_paths(name: str) -> None:
    assert not looks_like_path(name)


def test_a_gguf_file_is_to_be_converted(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    with pytest.raises(ModelError, match=r"small\.gguf' is a GGUF file\. hint: convert it: .*convert_gguf"):
        require_source(str(tmp_path / "small.gguf"))


def test_a_hub_that_is_not_there(online: Path, monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint(listener))
    listener.close()
    for load in (check_language_model, load_causal_lm, lambda name: ModelSource.find(name).tokenizer):
        with pytest.raises(ModelError, match=r"no folder 'praise-q' here, and the hub .* cannot be reached"):
            load("praise-q")


def test_a_hub_that_is_silent(online: Path, monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint(listener))
    monkeypatch.setattr(hub, "SECONDS_TO_ANSWER", 0.05)
    with pytest.raises(ModelError, match="cannot be reached"):
        check_language_model("praise-q")


def test_a_hub_that_answers_is_asked_for_the_model(online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            asked.append(self.path)

    asked: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = endpoint(server.socket)
        monkeypatch.setattr(constants, "ENDPOINT", here)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", here + "/{repo_id}/{revision}/{filename}")
        with pytest.raises(ModelError, match=r"cannot load config\.json from 'praise-q'"):
            check_language_model("praise-q")
        server.shutdown()
    assert any("praise-q" in path for path in asked)


def test_names_that_no_hub_has(online: Path) -> None:
    for name in ("a b", "ä中😀", "-a", "a..b"):
        with pytest.raises(ModelError, match="the hub has no names like this"):
            check_language_model(name)


def test_a_cached_name_needs_no_hub(online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_hub_answers", lambda: pytest.fail("the hub was asked"))
    folder = online / "models--me--mine"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert ModelSource.find("me/mine").config == {"model_type": "gpt2"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        check_language_model("me/other")


@pytest.mark.parametrize("text", ["{", "[]", "5", '"a"', "\x00"])
def test_damaged_configurations(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="damaged"):
        check_language_model(str(tmp_path))
