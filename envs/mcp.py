"""A client of the Model Context Protocol over stdin and stdout: starts a server, lists its tools, calls them.

The protocol is JSON-RPC 2.0, one message a line (modelcontextprotocol.io, revision 2025-06-18). The server is a program
of the user's own choice, so it runs with this process's rights; its stderr is not read.

    with closing(McpClient(["python", "server.py"])) as client:
        client.call("add", {"a": 1, "b": 2})
"""

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

VERSION = "2025-06-18"


class McpClient:
    """One server process, started by the first request. One request at a time; not for several threads."""

    def __init__(self, command: Sequence[str], seconds: float = 30.0) -> None:
        """`command`: the program and its arguments. `seconds`: the longest wait for a reply."""
        self._command, self._seconds = list(command), seconds
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        """What the server said; None after its end."""
        self._last_id = 0

    def tools(self) -> list[dict[str, Any]]:
        """Return the server's tools in OpenAI's schema. Raises as `call` does."""
        found, cursor = [], None
        while True:
            page = self._ask("tools/list", {"cursor": cursor} if cursor else {})
            for tool in page.get("tools", []):
                schema = tool.get("inputSchema") or {"type": "object", "properties": {}}
                described = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
                found.append({"type": "function", "function": described})
            if not (cursor := page.get("nextCursor")):
                return found

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's result. ValueError if the tool reports a failure; TimeoutError without a reply in
        time, ConnectionError if the server has ended: the next call starts it again."""
        result = self._ask("tools/call", {"name": name, "arguments": dict(arguments)})
        parts = [part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in result["content"]]
        text = "\n".join(parts)
        if result.get("isError"):
            raise ValueError(text)
        return text

    def close(self, grace: float = 1.0) -> None:
        """End the server: its stdin is closed, and after `grace` seconds it is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        try:
            return self._request(method, params)
        except (TimeoutError, ConnectionError):
            self.close(grace=0.0)
            raise

    def _start(self) -> None:
        self._lines = queue.Queue()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
        )
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        about = {"name": "spmd_rl", "version": "1"}
        try:
            self._request("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about})
            self._send({"method": "notifications/initialized"})
        except (TimeoutError, ConnectionError, ValueError):
            self.close(grace=0.0)
            raise

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise ConnectionError(f"the MCP server {self._command[0]} has ended") from None

    def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of one request. What the server asks or says meanwhile is answered or dropped."""
        self._last_id += 1
        self._send({"id": self._last_id, "method": method, "params": params})
        end = time.monotonic() + self._seconds
        while True:
            message = self._receive(end)
            if "method" in message and "id" in message:
                known = {"result": {}} if message["method"] == "ping" else {"error": {"code": -32601, "message": "no"}}
                self._send({"id": message["id"], **known})
            elif message.get("id") == self._last_id:
                if "error" in message:
                    raise ValueError(str(message["error"].get("message", message["error"])))
                return message["result"]

    def _receive(self, end: float) -> dict[str, Any]:
        """Return the server's next message, past lines that are none."""
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the MCP server {self._command[0]} gave no reply in time") from None
            if line is None:
                raise ConnectionError(f"the MCP server {self._command[0]} has ended")
            with contextlib.suppress(ValueError):
                if isinstance(message := json.loads(line), dict):
                    return message


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    """Pass on what the server says, then None."""
    with contextlib.suppress(ValueError):
        for line in stream:
            lines.put(line)
    lines.put(None)
