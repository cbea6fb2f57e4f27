"""What the rewarders' tests share: prompts, verdicts, real data, and a server whose replies a test makes up."""

import asyncio
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.sidecar import wire, worker
from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("SPMD_RL_DATA", ROOT.parent / "shared" / "data"))
INFO = AnswerInfo(1, "stop")
YES = {"choices": [{"message": {"content": "YES"}}], "usage": {"total_tokens": 50}}


def prompt(truth: str, question: str = "?", domain: str = "math", **extra: Any) -> Prompt:
    return Prompt("0" * 32, (Message("user", question),), domain, truth, extra)


def verdict(rewarder: Any, asked: Prompt, answer: str, timeout: float | None = None) -> Verdict:
    """As the sidecar's worker has it: whatever is raised is a verdict too."""
    return asyncio.run(worker.judge(rewarder, wire.ScoreInput(asked, answer, INFO), timeout))


async def score(rewarder: Any, asked: Prompt, answer: str, info: AnswerInfo = INFO) -> Verdict:
    found = rewarder.score(asked, answer, info)
    return await found if inspect.isawaitable(found) else found


def rows(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no {path}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def gsm8k_truth(row: dict[str, Any]) -> str:
    return row["answer"].rpartition("####")[2].strip()


@contextmanager
def server(reply: Callable[[Any], Any]) -> Iterator[tuple[str, list[Any]]]:
    """URL of a server, and what it was asked. `reply` gives an object, bytes, a status, a (status, headers) or seconds
    (a float) to wait before it hangs up."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append({"path": self.path, "body": body, "headers": dict(self.headers)})
            found, status, headers = reply(body), 200, {}
            if isinstance(found, float):
                time.sleep(found)
                self.close_connection = True
                return
            if isinstance(found, int):
                status, found = found, b"no"
            elif isinstance(found, tuple):
                (status, headers), found = found, b"no"
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            if headers.get("content-length"):  # more is promised: go on until the other side has had enough
                while self.wfile.write(b"1" * 65536):
                    pass

        def log_message(self, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *args: Any) -> None:
            pass  # the other side hung up

    listening = Quiet(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", asked
    finally:
        listening.shutdown()
        listening.server_close()
