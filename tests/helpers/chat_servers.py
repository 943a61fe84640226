"""OpenAI-compatible servers for tests of judges: one that fails as it is told, and a language model that says 4."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from radq.sources.hub import quiet

Answer = tuple[int, Any, dict[str, str]]  # status, document and headers
MARK = "==========\n"


def read_text(body: dict[str, Any]) -> str:
    """The text that a judge asks about."""
    return body["messages"][0]["content"].split(MARK)[1].removesuffix("\n")


def say(content: str | None, **usage: int) -> Answer:
    counts = {"prompt_tokens": 100, "completion_tokens": 2} | usage
    return 200, {"choices": [{"message": {"role": "assistant", "content": content}}], "usage": counts}, {}


def refuse(status: int, message: str = "no", headers: dict[str, str] | None = None, **details: Any) -> Answer:
    return status, {"error": {"message": message, **details}}, headers or {}


class FakeServer:
    """Answers by a function of the number of the call and its body. None stalls until the server closes.

    `calls` are the bodies of all calls, with the headers under "headers"; `texts` are those that got an answer.
    """

    def __init__(self, answer: Callable[[int, dict[str, Any]], Answer | None]):
        self.answer, self.calls, self.texts = answer, [], []
        self.lock, self.closing = threading.Lock(), threading.Event()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            number = len(self.calls)
            self.calls.append(body | {"headers": dict(handler.headers), "path": handler.path})
        found = self.answer(number, body)
        if found is None:
            self.closing.wait()
            return
        status, document, headers = found
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        if status == 200:
            with self.lock:
                self.texts.append(read_text(body))
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)


@contextmanager
def faking(answer: Callable[[int, dict[str, Any]], Answer | None]) -> Iterator[tuple[FakeServer, str]]:
    """Run such a server in threads of the test, and give its address."""
    fake = FakeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            fake.handle(self)

        def log_message(self, *arguments: Any) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: Any) -> None:  # a client that was killed, or waits no longer
            pass

    server = Listener(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
    thread.start()
    try:
        yield fake, f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        fake.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def make_grader(folder: Path, score: str = "4") -> Path:
    """A language model that says one score after any prompt, and then ends: the next token depends on the last one."""
    words = ["<|endoftext|>", "<unk>", f"▁{score}", *(f"▁word{n}" for n in range(29))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    size = len(words)
    lm = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size,
            n_embd=size,
            n_layer=1,
            n_head=1,
            n_positions=512,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.zero_()
        lm.transformer.wte.weight.copy_(torch.eye(size))
        lm.transformer.ln_f.weight.fill_(1)
        lm.lm_head.weight[2, :] = 20.0  # the score follows every token
        lm.lm_head.weight[[2, 0], 2] = torch.tensor([-20.0, 20.0])  # but itself, after which the text ends
    with quiet():
        lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
