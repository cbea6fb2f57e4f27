"""What the sidecar's tests share: a node, toy rewarders, questions, and a look at the processes."""

import asyncio
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from spmd_rl.config.schema import RewardConfig, RewardsConfig
from spmd_rl.sidecar.clients import ScoreClient
from spmd_rl.types import AnswerInfo, Message, Node, Prompt, Verdict
from tests.patience import patient

HERE = Path(__file__).parent


def private_node(monkeypatch) -> Iterator[Node]:
    """For a fixture: a node whose socket has a short path, and a path on which the toys are."""
    monkeypatch.syspath_prepend(str(HERE))
    with tempfile.TemporaryDirectory(prefix="spmd-") as directory:
        yield Node(0, 0, f"ipc://{directory}/s/host.sock")


def rewards(target: str, domain: str = "toy", **settings) -> RewardsConfig:
    return RewardsConfig(domains={domain: RewardConfig(target=f"sidecar_toys:{target}", **settings)})


def judged(notes: Path, mode: str = "serves", **settings) -> RewardsConfig:
    """A judge whose server is `judge_server.py`, which writes what it is into `notes`."""
    command = f"{sys.executable} {HERE / 'judge_server.py'} {mode} {{port}} {{model}} {notes}"
    given = {"devices": "cpu", "args": {"model": "a model"}, "timeout": 30.0} | settings
    return RewardsConfig(domains={"toy": RewardConfig("rewards.judge:JudgeReward", server=command, **given)})


def prompt(domain: str = "toy") -> Prompt:
    return Prompt("0" * 32, (Message("user", "?"),), domain, "truth", {"n": 1})


async def ask(scorer, answers, domain: str = "toy") -> list[Verdict]:
    return await asyncio.gather(*(scorer.score(prompt(domain), answer, AnswerInfo(3, "stop")) for answer in answers))


def numbers(answers) -> list[Verdict]:
    return [Verdict("ok", sum(answer.encode()) % 97 / 97, {"tokens": 3.0}, "truth") for answer in answers]


def host_of(scorer: ScoreClient) -> psutil.Process:
    return psutil.Process(scorer.host.pid)


def workers_of(scorer: ScoreClient) -> list[psutil.Process]:
    """Below the host are a keeper for each pool, its fork server, and the workers."""
    servers = [server for keeper in host_of(scorer).children() for server in keeper.children()]
    return [worker for server in servers for worker in server.children()]


def gone_within(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether they all end in time. One that is dead and not yet reaped (by pid 1, not by us) has ended."""
    deadline = time.monotonic() + patient(seconds)
    while any(map(_lives, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_address() -> str:
    """A loopback port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
