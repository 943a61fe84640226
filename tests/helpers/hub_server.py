"""A small hub: repositories in memory, to which huggingface_hub uploads files and from which it downloads them."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The files of each repository, the headers of all calls, and the only token that may write."""

    def __init__(self, token: str):
        self.token = token
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.address = ""

    def post(self, path: str, body: bytes, headers: Any) -> tuple[int, Any]:
        if headers.get("authorization") != f"Bearer {self.token}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.repositories.setdefault(name, {})
            return 200, {"url": f"{self.address}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        _, _, _, owner, name, action, *_ = path.split("/")
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                file = line["value"]
                self.repositories[f"{owner}/{name}"][file["path"]] = base64.b64decode(file["content"])
        address = f"{self.address}/{owner}/{name}/commit/{COMMIT}"
        return 200, {
            "success": True,
            "commitOid": COMMIT,
            "commitUrl": address,
            "hookOutput": "",
            "pullRequestUrl": None,
        }

    def find(self, path: str) -> bytes | None:
        """The file at OWNER/NAME/resolve/REVISION/PATH."""
        parts = path.strip("/").split("/")
        if len(parts) < 5 or parts[2] != "resolve":
            return None
        return self.repositories.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))


@contextmanager
def serve_hub(token: str) -> Iterator[Hub]:
    hub = Hub(token)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, document = hub.post(self.path.partition("?")[0], body, self.headers)
            self.answer(status, json.dumps(document).encode(), {"Content-Type": "application/json"})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            found = hub.find(self.path.partition("?")[0])
            if found is None:
                self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            else:
                etag = f'"{hashlib.sha256(found).hexdigest()[:40]}"'
                self.answer(200, found, {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})

        def answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
