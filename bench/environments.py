"""What asynchronous episodes save: 2,000 environments with random delays and a simulated engine. Run by hand.

    python -m bench.environments --envs 2000 --workers 20 --json environments.json [--mode process]

Environments nap (log-normal), a few hang and a few kill their process. The engine decodes one token of each request
under way in `--decode` seconds. Three runs over the same episodes: in *lock step*, all environments act, then the
engine answers all; *asynchronously*, each episode goes on as soon as it can; and again asynchronously while workers,
and once the host, are killed (SIGKILL). An episode that is lost is played again, and its result is compared with what
its seed says. The engine idles while it has no request. CPU milliseconds a step are those of the host and this process.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from spmd_rl import sidecar
from spmd_rl.config.sections.env import EnvConfig, EnvsConfig
from spmd_rl.sidecar.clients import RemoteEnvironments
from spmd_rl.sidecar.status import fetch_status
from spmd_rl.types import Node, Session, SessionLost
from tests.unit.sidecar_helpers import host_of, workers_of

TARGET = "tests.unit.session_toys:Slow"
TOKENS = (8, 40)
"""The fewest and the most tokens of an answer."""


class Engine:
    """Decodes one token of each request under way in `seconds`, and sleeps otherwise."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._under_way: list[list] = []
        self._come = asyncio.Event()
        self.busy = 0.0
        self.steps = 0
        self.tokens = 0

    async def generate(self, num_tokens: int) -> None:
        """Return once so many tokens are decoded."""
        done = asyncio.get_running_loop().create_future()
        self._under_way.append([num_tokens, done])
        self._come.set()
        await done

    async def run(self) -> None:
        """Decode until cancelled."""
        while True:
            await self._come.wait()
            self._come.clear()
            while batch := self._under_way:
                start = time.perf_counter()
                await asyncio.sleep(self._seconds)
                self.busy += time.perf_counter() - start
                self.steps += 1
                self.tokens += len(batch)
                for request in batch:
                    request[0] -= 1
                    if not request[0]:
                        request[1].set_result(None)
                self._under_way = [request for request in self._under_way if request[0]]


class Episodes:
    """Plays episodes in either way, and keeps the books."""

    def __init__(self, environments: RemoteEnvironments, options: argparse.Namespace) -> None:
        self._environments, self._options = environments, options
        self.engine = Engine(options.decode)
        self.results: dict[int, str] = {}
        self.lost: Counter[str] = Counter()
        self.steps = 0

    def tokens(self, seed: int, turn: int) -> int:
        """The length of an answer, equal in all runs."""
        return random.Random(seed * 1000 + turn).randint(*TOKENS)

    async def play(self, seed: int) -> None:
        """Play one episode until it comes to its end, however often it is lost."""
        while seed not in self.results:
            session = None
            try:
                session = await self._environments.reset("slow", seed)
                for turn in range(self._options.turns):
                    await self.engine.generate(self.tokens(seed, turn))
                    await session.step("a" * self.tokens(seed, turn))
                    self.steps += 1
                self.results[seed] = session.reply.observation
            except SessionLost as lost:
                self.lost[lost.reason] += 1
            finally:
                if session is not None:
                    await session.close()

    async def asynchronously(self) -> None:
        """Let each episode go on as soon as it can."""
        await asyncio.gather(*(self.play(seed) for seed in range(self._options.episodes)))

    async def in_lock_step(self) -> None:
        """Let all environments act, then the engine answer all; what is lost is played again at the end."""
        todo = list(range(self._options.episodes))
        while todo:
            await self._batch(todo[: self._options.envs])
            rest = todo[self._options.envs :]
            todo = rest + [seed for seed in todo[: self._options.envs] if seed not in self.results]

    async def _batch(self, seeds: list[int]) -> None:
        sessions = {
            seed: session
            for seed, session in zip(seeds, await asyncio.gather(*map(self._reset, seeds)), strict=True)
            if session
        }
        for turn in range(self._options.turns):
            await asyncio.gather(*(self.engine.generate(self.tokens(seed, turn)) for seed in sessions))
            alive = await asyncio.gather(*(self._step(seed, session, turn) for seed, session in sessions.items()))
            sessions = {seed: sessions[seed] for seed, lives in zip(list(sessions), alive, strict=True) if lives}
        for seed, session in sessions.items():
            self.results[seed] = session.reply.observation
            await session.close()

    async def _reset(self, seed: int) -> Session | None:
        try:
            return await self._environments.reset("slow", seed)
        except SessionLost as lost:
            self.lost[lost.reason] += 1
            return None

    async def _step(self, seed: int, session: Session, turn: int) -> bool:
        try:
            await session.step("a" * self.tokens(seed, turn))
            self.steps += 1
            return True
        except SessionLost as lost:
            self.lost[lost.reason] += 1
            await session.close()
            return False

    def wrong(self) -> int:
        """The number of episodes without a result, or with one that their seed does not say."""
        wrong = 0
        for seed in range(self._options.episodes):
            total = seed
            for turn in range(self._options.turns):
                total = (31 * total + self.tokens(seed, turn)) % 1_000_003
            wrong += self.results.get(seed) != f"at {total}"
        return wrong


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[tuple[RemoteEnvironments, str]]:
    """Environments of a host of their own, and its address."""
    args = {"median": options.median, "sigma": options.sigma, "hangs": options.hangs, "dies": options.dies}
    per_worker = -(-options.envs // options.workers)
    limits = {"step_timeout": options.timeout, "reset_timeout": options.timeout}
    env = EnvConfig(TARGET, args, workers=options.workers, mode=options.mode, envs_per_worker=per_worker, **limits)
    with tempfile.TemporaryDirectory(prefix="spmd-") as directory:
        node = Node(0, 0, f"ipc://{directory}/s/host.sock")
        with sidecar.connect_environments(EnvsConfig(tags={"slow": env}), node) as environments:
            yield environments, node.address


async def killer(environments: RemoteEnvironments, seconds: float, killed: Counter[str]) -> None:
    """Kill a worker each second, and the host once, after `seconds`."""
    while True:
        for _ in range(int(seconds)):
            await asyncio.sleep(1.0)
            if workers := workers_of(environments):
                random.choice(workers).kill()
                killed["workers"] += 1
        if not killed["hosts"]:
            host_of(environments).kill()
            killed["hosts"] += 1
        elif killed["workers"] >= 10:
            return


def cpu_seconds(environments: RemoteEnvironments) -> float:
    """Those of the host and of this process."""
    return sum(sum(process.cpu_times()[:2]) for process in (psutil.Process(), host_of(environments)))


def measure(options: argparse.Namespace, how: str) -> dict[str, Any]:
    """One run: seconds, the engine's idle share, CPU milliseconds a step, what was lost and what is wrong."""
    killed: Counter[str] = Counter()
    with connected(options) as (environments, address):

        async def run() -> tuple[Episodes, float]:
            episodes = Episodes(environments, options)
            tasks = [asyncio.create_task(episodes.engine.run())]
            if how == "kills":
                tasks.append(asyncio.create_task(killer(environments, 5.0, killed)))
            start = time.perf_counter()
            await (episodes.in_lock_step() if how == "lock step" else episodes.asynchronously())
            seconds = time.perf_counter() - start
            for task in tasks:
                task.cancel()
            return episodes, seconds

        before = cpu_seconds(environments)
        episodes, seconds = asyncio.run(run())
        spent = cpu_seconds(environments) - (0 if how == "kills" else before)
        time.sleep(1.0)
        status = fetch_status(address, None).envs["slow"]
    return {
        "how": how,
        "seconds": seconds,
        "idle_share": 1 - episodes.engine.busy / seconds,
        "mean_batch": episodes.engine.tokens / max(1, episodes.engine.steps),
        "cpu_ms_a_step": 1e3 * spent / episodes.steps,
        "steps": episodes.steps,
        "lost": dict(episodes.lost),
        "killed": dict(killed),
        "wrong": episodes.wrong(),
        "still_open": status.running,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--mode", choices=("thread", "process"), default="thread")
    parser.add_argument("--median", type=float, default=0.5, help="seconds of a nap")
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--hangs", type=float, default=2e-4, help="the share of steps that hang")
    parser.add_argument("--dies", type=float, default=1e-4, help="the share of steps that kill their process")
    parser.add_argument("--timeout", type=float, default=20.0, help="of a step, in seconds")
    parser.add_argument("--decode", type=float, default=0.025, help="seconds of the engine for a token of each request")
    parser.add_argument("--runs", default="lock step,async,kills")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for how in options.runs.split(","):
        results.append(measure(options, how))
        print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
