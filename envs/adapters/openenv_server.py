"""An environment behind an OpenEnv server, over its WebSocket, without OpenEnv's package or a typed client.

    env.echo.target=envs.adapters.openenv_server:OpenEnvServer env.echo.args.server=http://127.0.0.1:8000

Messages are JSON: `{"type": "reset" | "step" | "close", "data": {...}}`; the reply is an `observation`, whose data has
`observation`, `reward` and `done`, or an `error`. An action that is a JSON object is sent unchanged, another text as
`{<action_key>: text}`. The text of an observation is its `observation_key`, or without one all of it as JSON.

A server takes one session at a time unless its class sets `SUPPORTS_CONCURRENT_SESSIONS`; keep one environment a server
then. The client needs the package `websockets`.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from typing import Any

MAX_BYTES = 100 << 20
"""Largest message in bytes, OpenEnv's own limit."""


class OpenEnvServer:
    """A session with the server; one connection, opened by the first reset and again after it is lost."""

    def __init__(
        self,
        server: str,
        action_key: str = "message",
        observation_key: str = "",
        reset: Mapping[str, Any] | None = None,
        seconds: float = 60.0,
    ) -> None:
        """Configure the session; no connection is opened yet.

        `server`: its URL, http or ws. `reset`: further arguments of the server's reset. `seconds`: the longest wait for
        a reply. ValueError for a URL of another kind.
        """
        from websockets.exceptions import ConnectionClosed
        from websockets.sync.client import connect

        scheme, _, rest = server.partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not rest:
            raise ValueError(f"server={server}: a URL with http, https, ws or wss")
        self._url = f"{'wss' if scheme in ('https', 'wss') else 'ws'}://{rest.rstrip('/')}"
        self._url += "" if self._url.endswith("/ws") else "/ws"
        self._connect, self._lost, self._socket = connect, ConnectionClosed, None
        self._action_key, self._observation_key = action_key, observation_key
        self._reset, self._seconds, self._seen = dict(reset or {}), seconds, ""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin an episode. Seeds have 31 bits. Raises as `step` does."""
        self._seen, _, _ = self._ask("reset", {"seed": seed % 2**31, **self._reset})
        return self._seen, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act. ConnectionError if the server is gone, TimeoutError without a reply in time, RuntimeError if it reports
        an error.
        """
        before = self._seen
        self._seen, reward, done = self._ask("step", self._action(action))
        metrics = {
            "success": float(done and reward >= 1.0),
            "action_is_valid": float(bool(action.strip())),
            "action_is_effective": float(self._seen != before),
        }
        return self._seen, reward, done, False, {"metrics": metrics, "metrics_agg_mode": {"success": "last"}}

    def close(self) -> None:
        """End the session and close its connection."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(self._lost, OSError):
                socket.send('{"type": "close"}')
            socket.close()

    def _action(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {self._action_key: text}

    def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[str, float, bool]:
        """Return (text, reward, done) of the reply."""
        try:
            if self._socket is None:
                if kind != "reset":
                    raise ConnectionError(f"{self._url}: no session; reset comes first")
                self._socket = self._connect(self._url, open_timeout=10.0, max_size=MAX_BYTES)
            self._socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(self._socket.recv(timeout=self._seconds))
        except self._lost as error:
            self._socket = None
            raise ConnectionError(f"{self._url}: the connection is lost: {error}") from None
        except TimeoutError:
            self.close()
            raise TimeoutError(f"{self._url}: no reply in {self._seconds:g} s") from None
        found = reply.get("data") or {}
        if reply.get("type") != "observation":
            raise RuntimeError(f"{self._url}: {found.get('code', '')} {found.get('message', str(reply)[:200])}".strip())
        reward = float(found.get("reward") or 0.0)
        if not isfinite(reward):
            raise RuntimeError(f"{self._url}: the reward is {reward}")
        return self._text(found.get("observation")), reward, bool(found.get("done"))

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self._observation_key:
            return str(observation[self._observation_key])
        return json.dumps(observation, ensure_ascii=False)
