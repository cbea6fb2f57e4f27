"""Serves the page and its data: HTTP on the loopback address, for this machine's user.

Readers need the address, which holds a random key, and a name of this machine (`Host`), so that no other site's page
can read through a DNS name that points here. A model's text only fills text nodes; the content security policy allows
no other script or server.
"""

import hmac
import secrets
import sys
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import yaml

from spmd_rl.base.errors import UserError, one_line, tell
from spmd_rl.tools.compare import comparison
from spmd_rl.tools.view.open_metrics import CONTENT_TYPE, open_metrics
from spmd_rl.tools.view.runs import RunIndex
from spmd_rl.track.live import live
from spmd_rl.track.page_data import outline, overview, samples, trajectories
from spmd_rl.track.report import page, policy
from spmd_rl.track.run_reader import RunData

HOSTS = {"127.0.0.1", "localhost"}
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
Query = Mapping[str, str]


class Data:
    """Data requests of the page, by name. KeyError or ValueError for arguments missing or unknown."""

    def __init__(self, runs: RunIndex) -> None:
        self._runs = runs
        self.answers: dict[str, Callable[[Query], Any]] = {
            "runs": lambda query: self._runs.summaries(),
            "run": lambda query: outline(query["run"], self._run(query)),
            "overview": lambda query: overview(self._run(query)),
            "live": lambda query: live(self._run(query)),
            "series": lambda query: self._run(query).curves(int(query["last"])),
            "step": lambda query: samples(self._run(query), query["kind"], int(query["step"])),
            "trajectories": self._trajectories,
            "compare": lambda query: comparison({name: self._runs.read(name) for name in self._runs.names()}),
        }

    def open_metrics(self) -> str:
        """Return all runs' last metrics, see `open_metrics`."""
        runs = {name: self._runs.read(name) for name in self._runs.names()}
        return open_metrics({name: (run, live(run)) for name, run in runs.items()})

    def _run(self, query: Query) -> RunData:
        return self._runs.read(query["run"])

    def _trajectories(self, query: Query) -> list[dict[str, Any]]:
        run, kind, step = self._run(query), query["kind"], int(query["step"])
        found = samples(run, kind, step)
        if "marked" in query:
            places = {place for some in found["marked"].values() for place in some}
        else:
            ticket, answer = int(query["ticket"]), query.get("answer")
            of_ticket = [row["answer"] for row in found["rows"] if row["ticket"] == ticket]
            places = {(ticket, one) for one in of_ticket if answer is None or one == int(answer)}
        return trajectories(run, kind, step, places)


class ViewServer(ThreadingHTTPServer):
    """The server; `url` is the page's address. OSError if the port is taken."""

    daemon_threads = True

    def __init__(self, runs: RunIndex, port: int = 0, metrics: bool = False) -> None:
        """Bind the port; 0: any. metrics: serve numbers at `/metrics` without the key."""
        # Loopback only; samples may hold private data.
        super().__init__(("127.0.0.1", port), Handler)
        self.key = secrets.token_urlsafe(16)
        self.data, self.metrics = Data(runs), metrics
        self.url = f"http://127.0.0.1:{self.server_port}/{self.key}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print one line, except after a closed connection."""
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError):
            tell(f"view: {one_line(error)}")


class Handler(BaseHTTPRequestHandler):
    """Handler of one request; only GET is supported."""

    server: ViewServer
    server_version, sys_version = "spmd_rl", ""

    def do_GET(self) -> None:
        """Answer with the page, JSON, or an error as JSON."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        address = urlsplit(self.path)
        key, _, rest = address.path.removeprefix("/").partition("/")
        # Numbers alone, since whoever reads them has a fixed address in its settings.
        if self.server.metrics and host in HOSTS and address.path == "/metrics":
            return self._write(200, CONTENT_TYPE, self.server.data.open_metrics().encode(), {})
        # `compare_digest` takes the same time for every wrong key, so that it cannot be guessed byte by byte.
        if host not in HOSTS or not hmac.compare_digest(key.encode(), self.server.key.encode()):
            return self._send(403, {"error": "not the address that was printed"})
        if not rest:
            return self._page()
        answer = self.server.data.answers.get(rest.removeprefix("api/"))
        if answer is None:
            return self._send(404, {"error": "no such thing"})
        try:
            return self._send(200, answer(dict(parse_qsl(address.query))))
        except KeyError as error:
            return self._send(404, {"error": f"not there: {error.args[0]}"})
        except (OSError, UserError, ValueError, msgspec.MsgspecError, yaml.YAMLError) as error:
            return self._send(500, {"error": one_line(error)})

    def _page(self) -> None:
        allowed = f"{policy(asks=True)}; frame-ancestors 'none'"
        self._write(200, "text/html", page("view").encode(), {"Content-Security-Policy": allowed})

    def _send(self, status: int, content: Any) -> None:
        self._write(status, "application/json", msgspec.json.encode(content), {})

    def _write(self, status: int, kind: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests are no news."""
