"""A client of the Model Context Protocol over stdin and stdout: starts a server, lists its tools, calls them.

The protocol is JSON-RPC 2.0, one message a line (modelcontextprotocol.io, revision 2025-06-18). The server is the
user's own choice, so it runs with this process's rights. Its stderr is shown if it dies.

    with closing(McpClient(["python", "server.py"])) as client:
        client.call("add", {"a": 1, "b": 2})
"""

import contextlib
import json
import os
import selectors
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .tool_calls import ToolsLost

VERSION = "2025-06-18"
MAX_LINE_BYTES = 16 << 20
"""Largest line of a server in bytes; a longer one ends it."""
LAST_WORDS_BYTES = 2000
"""Number of bytes kept of the end of a server's stderr."""
PIPE_BYTES = 1 << 16


class McpClient:
    """A client of one server process, started by the first request. One request at a time; not for several threads."""

    def __init__(self, command: Sequence[str], seconds: float = 30.0) -> None:
        """Take the program with its arguments, and the longest wait for a reply."""
        self._command, self._seconds = list(command), seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._said, self._last_words = bytearray(), b""
        """Unparsed part of its stdout, and the end of its stderr."""
        self._last_id = 0
        self._name = f"the MCP server `{shlex.join(self._command)[:150]}`"

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
        time, `ToolsLost` if the server has ended: the next call restarts it.
        """
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
        process.stdout.close()
        process.stderr.close()

    def _ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        try:
            return self._request(method, params)
        except (TimeoutError, ConnectionError):
            self.close(grace=0.0)
            raise

    def _start(self) -> None:
        self._said, self._last_words, pipe = bytearray(), b"", subprocess.PIPE
        try:
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        except OSError as error:
            raise ToolsLost(f"{self._name} cannot be started: {error.strerror}") from None
        # Non-blocking: a server that stops reading must not block this process past its deadline.
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(stream.fileno(), False)
        about = {"name": "spmd_rl", "version": "1"}
        try:
            self._request("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about})
            self._send({"method": "notifications/initialized"}, time.monotonic() + self._seconds)
        except (TimeoutError, ConnectionError, ValueError):
            self.close(grace=0.0)
            raise

    def _send(self, message: Mapping[str, Any], end: float) -> None:
        left = memoryview(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        while left:
            self._transfer(end, sending=True)
            try:
                left = left[self._process.stdin.write(left) or 0 :]
            except BrokenPipeError:
                raise ToolsLost(self._farewell()) from None

    def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of one request. Requests of the server are answered, and its notifications dropped."""
        self._last_id += 1
        end = time.monotonic() + self._seconds
        self._send({"id": self._last_id, "method": method, "params": params}, end)
        while True:
            message = self._receive(end)
            if "method" in message and "id" in message:
                known = {"result": {}} if message["method"] == "ping" else {"error": {"code": -32601, "message": "no"}}
                self._send({"id": message["id"], **known}, end)
            elif message.get("id") == self._last_id:
                if "error" in message:
                    raise ValueError(str(message["error"].get("message", message["error"])))
                return message["result"]

    def _receive(self, end: float) -> dict[str, Any]:
        """Return the server's next message, skipping other lines."""
        while True:
            if (length := self._said.find(b"\n")) >= 0:
                line = bytes(self._said[:length])
                del self._said[: length + 1]
                with contextlib.suppress(ValueError, RecursionError):
                    if isinstance(message := json.loads(line), dict):
                        return message
            else:
                self._transfer(end)

    def _transfer(self, end: float, sending: bool = False) -> None:
        """Read available data of both streams, or wait for data, or until the server can read.

        Of stdout at most one line is buffered. TimeoutError at the deadline, ConnectionError if the server ends.
        """
        process, wanted = self._process, {self._process.stdin} if sending else set()
        wanted |= {process.stdout} if len(self._said) <= MAX_LINE_BYTES else set()
        # stderr is read as well: a server that fills its pipe would block.
        wanted |= {process.stderr} if not process.stderr.closed else set()
        with selectors.DefaultSelector() as selector:
            for stream in wanted:
                selector.register(stream, selectors.EVENT_WRITE if stream is process.stdin else selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(max(0.0, end - time.monotonic()))]
        if time.monotonic() >= end:
            raise TimeoutError(f"{self._name} gave no reply in time{self._quoted()}")
        if process.stderr in ready and self._hear() == b"":
            process.stderr.close()
        if process.stdout in ready:
            chunk = process.stdout.read(PIPE_BYTES)
            if chunk == b"":
                raise ToolsLost(self._farewell())
            self._said += chunk or b""
        if len(self._said) > MAX_LINE_BYTES and b"\n" not in self._said:
            raise ToolsLost(f"{self._name} sent a line of over {MAX_LINE_BYTES} bytes")

    def _hear(self) -> bytes | None:
        """Read from stderr: empty at its end, None without new data."""
        heard = self._process.stderr.read(PIPE_BYTES)
        self._last_words = (self._last_words + (heard or b""))[-LAST_WORDS_BYTES:]
        return heard

    def _farewell(self) -> str:
        """Return text on the end of the server, with its last lines."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # By then it has written its last lines.
            self._process.wait(1.0)
        while not self._process.stderr.closed and len(self._hear() or b"") == PIPE_BYTES:
            pass
        code = self._process.returncode
        return f"{self._name} has ended{'' if code is None else f' with code {code}'}{self._quoted()}"

    def _quoted(self) -> str:
        """Return the end of the server's stderr, its last line first, since messages of one line show only that."""
        *before, last = self._last_words.decode(errors="replace").strip().split("\n")
        return (f": {last}" if last else "") + "".join(f"\n{line}" for line in ["its last words:", *before] if before)
