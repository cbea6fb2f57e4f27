"""What a sidecar carries: verdicts a second, latency at a steady load, and what killed workers cost. Run by hand.

    python -m bench.sidecar --workers 2 --repeat 5 --json sidecar.json [--curve]

`rate`: 2048 coroutines of one client, each of which asks again as soon as it is answered. `latency`: questions at fixed
times, whoever waits for whom, counted from the moment at which a question was due; between them the client sleeps in
its event loop. `kill`: the first again, with half the workers killed (SIGKILL) on the way; every verdict is compared.

The rewarder is trivial (a sum over the answer's bytes): what is measured is the road. CPU milliseconds a thousand
verdicts are those of client, host and workers. Where others use the machine, the best of several runs is the figure,
and the share of a core that the busiest process got says how much of it was to be had.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench import show
from launch.sidecar_keys import make
from spmd_rl import sidecar
from spmd_rl.config.schema import RewardConfig, RewardsConfig
from spmd_rl.sidecar.clients import ScoreClient
from spmd_rl.sidecar.reward_server import free_port
from spmd_rl.types import AnswerInfo, Node, Verdict
from tests.unit.sidecar_helpers import host_of, numbers, prompt, workers_of

INFO = AnswerInfo(3, "stop")
PROMPT = prompt()
TARGET = "tests.unit.sidecar_toys:Number"
ASKING = 2048
SLICE_SECONDS = 0.25


@contextmanager
def scorer(workers: int, curve: bool = False) -> Iterator[ScoreClient]:
    """A client of its own host, warm; over ipc, or over TCP on the loopback with CURVE."""
    rewards = RewardsConfig(domains={"toy": RewardConfig(target=TARGET, workers=workers)})
    with tempfile.TemporaryDirectory(prefix="spmd-") as directory:
        way = {"bind": f"tcp://127.0.0.1:{free_port()}", "keys": str(make(Path(directory) / "keys"))} if curve else {}
        with sidecar.connect(rewards, Node(0, 0, f"ipc://{directory}/s/host.sock"), **way) as client:
            asyncio.run(ask(client, [str(number) for number in range(4000)]))
            yield client


async def ask(client: ScoreClient, answers: list[str], landed: Callable[[], Any] = lambda: None) -> list[Verdict]:
    """The verdicts, asked by `ASKING` coroutines; `landed` is called at each."""
    verdicts: list[Any] = [None] * len(answers)
    places = iter(range(len(answers)))

    async def one() -> None:
        for place in places:
            verdicts[place] = await client.score(PROMPT, answers[place], INFO)
            landed()

    await asyncio.gather(*(one() for _ in range(ASKING)))
    return verdicts


def cpu_seconds(client: ScoreClient) -> dict[str, float]:
    """Of each kind of process so far."""
    times = {"client": [psutil.Process()], "host": [host_of(client)], "workers": workers_of(client)}
    return {name: sum(sum(p.cpu_times()[:2]) for p in processes) for name, processes in times.items()}


def rate(client: ScoreClient, number: int) -> dict[str, float]:
    """Verdicts a second, and milliseconds of processor time that a thousand verdicts take."""
    answers = [str(i % 97) for i in range(number)]
    before, start = cpu_seconds(client), time.perf_counter()
    verdicts = asyncio.run(ask(client, answers))
    seconds, after = time.perf_counter() - start, cpu_seconds(client)
    assert verdicts == numbers(answers)
    spent = {name: after[name] - before[name] for name in before}
    parts = {f"{name}_ms": 1e6 * spent[name] / number for name in before}
    busiest = max(spent.values()) / seconds
    return {"per_second": number / seconds, "cpu_ms": sum(parts.values()), **parts, "busiest_share": busiest}


def latency(client: ScoreClient, load: float, seconds: float) -> dict[str, float]:
    """Milliseconds from the moment a question was due to its verdict, at `load` questions a second; and how late the
    client itself was to ask, which no sidecar can make good."""
    waited: list[float] = []
    late: list[float] = []

    async def one(answer: str, due: float) -> None:
        late.append(1e3 * (time.perf_counter() - due))
        await client.score(PROMPT, answer, INFO)
        waited.append(1e3 * (time.perf_counter() - due))

    async def steadily() -> None:
        tasks, start, asked = set(), time.perf_counter(), 0
        while (now := time.perf_counter() - start) < seconds:
            while asked < now * load:
                task = asyncio.create_task(one(str(asked % 97), start + asked / load))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                asked += 1
            await asyncio.sleep(0.0002)
        await asyncio.gather(*tasks)

    before = cpu_seconds(client)
    asyncio.run(steadily())
    spent = sum(cpu_seconds(client).values()) - sum(before.values())
    points = statistics.quantiles(waited, n=100)
    return {
        "load": load,
        "p50_ms": points[49],
        "p90_ms": points[89],
        "p99_ms": points[98],
        "max_ms": max(waited),
        "late_p99_ms": statistics.quantiles(late, n=100)[98],
        "cpu_ms": 1e6 * spent / len(waited),
    }


def kill(client: ScoreClient, number: int) -> dict[str, Any]:
    """Half the workers die a third of the way: wrong verdicts (0), and verdicts in each slice of time."""
    answers = [str(i % 97) for i in range(number)]
    times: list[float] = []
    victims = workers_of(client)
    killed: list[float] = []

    def landed() -> None:
        times.append(time.perf_counter())
        if len(times) == number // 3:
            for worker in victims[: len(victims) // 2]:
                worker.kill()
            killed.append(time.perf_counter())

    start = time.perf_counter()
    verdicts = asyncio.run(ask(client, answers, landed))
    wrong = sum(found != wanted for found, wanted in zip(verdicts, numbers(answers), strict=True))
    slices = Counter(int((at - start) / SLICE_SECONDS) for at in times)
    per_second = [slices[i] / SLICE_SECONDS for i in range(max(slices))]  # the last is not full
    return {
        "wrong": wrong,
        "killed_at": killed[0] - start,
        "per_second": per_second,
        "back": back(per_second, killed[0] - start),
    }


def back(per_second: list[float], killed_at: float) -> float | None:
    """Seconds from the kill to the end of the first slice after it that reaches 80% of the median before it."""
    struck = int(killed_at / SLICE_SECONDS)
    if not per_second:  # over within one slice
        return None
    usual = statistics.median(per_second[:struck] or per_second)
    again = (place for place in range(struck + 1, len(per_second)) if per_second[place] >= 0.8 * usual)
    return next(((place + 1) * SLICE_SECONDS - killed_at for place in again), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--curve", action="store_true", help="over TCP on the loopback, encrypted")
    parser.add_argument("--number", type=int, default=40_000)
    parser.add_argument("--load", type=float, default=10_000.0)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {"rate": [], "latency": [], "kill": []}
    for _ in range(options.repeat):
        with scorer(options.workers, options.curve) as client:
            figures["rate"].append(rate(client, options.number))
            figures["latency"].append(latency(client, options.load, options.seconds))
            figures["kill"].append(kill(client, 2 * options.number))
        for name, rows in figures.items():
            rows[-1]["loadavg"] = os.getloadavg()[0]
            print(name, {k: round(v, 2) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
        show.record(
            options.json, {"benchmark": "sidecar", "workers": options.workers, "curve": options.curve, **figures}
        )
    best = max(figures["rate"], key=lambda row: row["per_second"])
    quick = min(figures["latency"], key=lambda row: row["p99_ms"])
    times = ", ".join("never" if row["back"] is None else f"{row['back']:.2f}" for row in figures["kill"])
    rows = [
        ["rate", f"{best['per_second']:.0f}/s", f"{min(row['cpu_ms'] for row in figures['rate']):.1f} CPU-ms/1000"],
        ["latency", f"p50 {quick['p50_ms']:.2f} ms", f"p99 {quick['p99_ms']:.2f} ms at {options.load:g}/s"],
        ["kill", f"{sum(row['wrong'] for row in figures['kill'])} wrong", f"back after {times} s"],
    ]
    road = "TCP with CURVE" if options.curve else "ipc"
    show.table(f"Sidecar over {road}, {options.workers} workers, best of {options.repeat}", ["", "", ""], rows)


if __name__ == "__main__":
    sys.exit(main())
