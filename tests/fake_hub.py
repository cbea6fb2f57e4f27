"""A hub on this machine for tests: serves `root/ORG/NAME/*` as models, to the real client.

with fake_hub(root) as url: run(env={"HF_ENDPOINT": url, ...})
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without any"""
COMMIT = "c" * 40


@contextmanager
def fake_hub(root: Path) -> Iterator[str]:
    """Yield the address of a hub whose only revision of each model is `COMMIT`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = urlsplit(self.path).path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                return self.describe(root / parts[2] / parts[3], parts[4])
            file = root.joinpath(*parts[:2], *parts[4:])
            if "resolve" not in parts or not file.is_file():
                return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            return self.reply(200, file.read_bytes(), {"ETag": f'"{digest(file)}"', "X-Repo-Commit": COMMIT})

        def describe(self, folder: Path, what: str) -> None:
            if not folder.is_dir():
                return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            found = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
            tree = [{"type": "file", "path": n, "size": p.stat().st_size, "oid": digest(p)} for n, p in found.items()]
            info = {"id": f"{folder.parent.name}/{folder.name}", "sha": COMMIT, "siblings": []}
            return self.reply(200, json.dumps(tree if what == "tree" else info).encode(), {})

        def reply(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
