"""HTTP for rewarders: the service behind a constructor parameter named `http` (`Http` in `types.py`), by httpx.

Leaves out redirects, which are refused, and limits to the rate: a server that is too busy says so, and is asked again
later.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

MAX_REPLY_BYTES = 1 << 20
MAX_PAUSE = 30.0
"""Seconds between two attempts, even if the server asks for more."""
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpService:
    """An `Http`. Its connections are kept and belong to the event loop that used it last."""

    def __init__(self, attempts: int = 4, pause: float = 0.5, seconds: float = 300.0, connections: int = 256) -> None:
        """`pause`: seconds before the second attempt, doubled for each further one. `seconds`: for one reply."""
        self._attempts, self._pause = attempts, pause
        self._timeout, self._limits = httpx.Timeout(seconds, connect=10.0), httpx.Limits(max_connections=connections)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, url: str, body: Any, headers: Mapping[str, str] = {}) -> Any:
        """See `Http`."""
        failure = ""
        for attempt in range(self._attempts):
            try:
                status, content, after = await self._once(url, body, headers)
            except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:
                raise TimeoutError(f"{url}: no reply in time") from error
            except httpx.TransportError as error:
                failure, after = f"{type(error).__name__}: {error}", 0.0
            else:
                if status == 200:
                    return _json(url, content)
                failure = f"{status} {content[:200].decode(errors='replace')}"
                if status not in BUSY:
                    raise ValueError(f"{url}: {failure}")
            if attempt + 1 < self._attempts:
                await asyncio.sleep(min(max(self._pause * 2**attempt, after), MAX_PAUSE))
        raise ConnectionError(f"{url}: {failure} ({self._attempts} attempts)")

    async def _once(self, url: str, body: Any, headers: Mapping[str, str]) -> tuple[int, bytes, float]:
        """Status, content (up to the limit and a little), seconds to wait as the server has it."""
        if self._client is None or self._loop is not asyncio.get_running_loop():
            self._client = httpx.AsyncClient(timeout=self._timeout, limits=self._limits)
            self._loop = asyncio.get_running_loop()
        content = b""
        async with self._client.stream("POST", url, json=body, headers=dict(headers)) as reply:
            async for chunk in reply.aiter_bytes():
                content += chunk
                if len(content) > MAX_REPLY_BYTES:
                    break
        after = reply.headers.get("retry-after", "")
        return reply.status_code, content, float(after) if after.isdigit() else 0.0


def _json(url: str, content: bytes) -> Any:
    if len(content) > MAX_REPLY_BYTES:
        raise ValueError(f"{url}: the reply is longer than {MAX_REPLY_BYTES} bytes")
    try:
        return json.loads(content)
    except ValueError:
        raise ValueError(f"{url}: the reply is no JSON: {content[:200].decode(errors='replace')}") from None
