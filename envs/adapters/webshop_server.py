"""The original WebShop behind AgentGym's HTTP server (`agentenv-webshop`): its data, its search, its pages.

    env.shop.target=envs.adapters.webshop_server:WebShopServer env.shop.args.server=http://127.0.0.1:36001

Each environment here has one on the server. The seed picks a wish of the split, as in `envs.webshop`: the server
shuffles its wishes with seed 233 and takes their number for a session. Metrics are those of `envs.webshop`.
"""

from contextlib import suppress
from typing import Any

from ..webshop import AGGREGATION, INSTRUCTION
from ..webshop_catalogue import SPLITS


class WebShopServer:
    """A client by `httpx`; each request waits at most `seconds`."""

    def __init__(
        self, server: str, split: str = "train", goals: int = 6910, strict: bool = False, seconds: float = 60.0
    ) -> None:
        """Configure the client. `goals`: number of the server's wishes (6,910 with its 1,000 products). `strict`: pay
        only a perfect purchase.

        ValueError for an unknown split or one without wishes.
        """
        import httpx

        if split not in SPLITS:
            raise ValueError(f"split={split}: known are {', '.join(SPLITS)}")
        begin, end = SPLITS[split]
        self._goals = range(begin, min(end or goals, goals))
        if not self._goals:
            raise ValueError(f"split={split}: it begins at wish {begin}, and there are {goals}")
        self._http, self._failure, self._strict = (
            httpx.Client(base_url=server, timeout=seconds),
            httpx.HTTPError,
            strict,
        )
        self._index: int | None = None
        self._seen, self._offered = "", list[str]()

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Enter the shop with a wish. Raises `httpx` errors, and ValueError for an invalid reply."""
        if self._index is None:
            self._index = int(self._post("/create", {}))
        session = self._goals[seed % len(self._goals)]
        text = self._post("/reset", {"env_idx": self._index, "session_id": session})[0]
        self._seen = self._page(str(text))
        return self._seen, {"instruction": INSTRUCTION}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Search or click, by a request to the server."""
        reply = self._post("/step", {"env_idx": self._index, "action": action})
        worth, done, before = float(reply["reward"]), bool(reply["done"]), self._seen
        asked = action.strip().lower()
        valid = asked in self._offered or (asked.startswith("search[") and "search[<content>]" in self._offered)
        self._seen = str(reply["state"]) if done else self._page(str(reply["state"]))
        success = float(done and worth >= 1.0)
        metrics = {
            "success": success,
            "task_score": 100.0 * worth,
            "purchase": float(done),
            "action_is_valid": float(valid),
            "action_is_effective": float(self._seen != before),
        }
        info = {"metrics": metrics, "metrics_agg_mode": AGGREGATION}
        return self._seen, success if self._strict else worth, done, False, info

    def close(self) -> None:
        """Close the environment on the server."""
        if self._index is not None:
            with suppress(self._failure):
                self._post("/close", {"env_idx": self._index})
        self._index = None
        self._http.close()

    def _page(self, text: str) -> str:
        reply = self._http.get("/available_actions", params={"env_idx": self._index})
        reply.raise_for_status()
        found = reply.json()
        clicks = [f"click[{value}]" for value in found["clickables"] if value != "search"]
        self._offered = ["search[<content>]"] * bool(found["has_search_bar"]) + clicks
        return f"{text}\nAvailable actions: {', '.join(self._offered)}"

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        reply = self._http.post(path, json=body)
        reply.raise_for_status()
        return reply.json()
