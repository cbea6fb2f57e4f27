"""The HTTP service of rewarders, their constructor parameter `http` (`Http` in `spmd_rl.types`), by httpx.

Redirects are refused. After a busy server's reply the request is repeated.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

MAX_REPLY_BYTES = 1 << 20
MAX_PAUSE = 30.0
"""Longest pause between attempts, regardless of `Retry-After`."""
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpService:
    """An `Http` client with persistent connections, bound to the event loop in use."""

    def __init__(self, attempts: int = 4, pause: float = 0.5, seconds: float = 300.0, connections: int = 256) -> None:
        """pause: seconds before the second attempt, doubled each time. seconds: limit of a reply."""
        self._attempts, self._pause = attempts, pause
        self._timeout, self._limits = httpx.Timeout(seconds, connect=10.0), httpx.Limits(max_connections=connections)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, url: str, body: Any, headers: Mapping[str, str] = {}) -> Any:
        """Post JSON and return the reply's JSON. Errors: see `Http.post`."""
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
                if status not in RETRIED:
                    raise ValueError(f"{url}: {failure}")
            if attempt + 1 < self._attempts:
                await asyncio.sleep(min(max(self._pause * 2**attempt, after), MAX_PAUSE))
        raise ConnectionError(f"{url}: {failure} ({self._attempts} attempts)")

    async def _once(self, url: str, body: Any, headers: Mapping[str, str]) -> tuple[int, bytes, float]:
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
        raise ValueError(f"{url}: the reply is not JSON: {content[:200].decode(errors='replace')}") from None
