"""All attacks of an outsider at once, and honest clients: the host lives, and their verdicts arrive and are right."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch import sidecar_keys
from spmd_rl import sidecar
from spmd_rl.base.curve_keys import ClientKeys
from spmd_rl.sidecar.status import fetch_status
from tests.patience import patient
from tests.unit.sidecar_helpers import ask, free_address, host_of, numbers, private_node, rewards

ROOT = Path(__file__).parents[2]
FILES = 1024
"""The host's limit of open files, of which the outsider holds half."""


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


@contextlib.contextmanager
def attacked(address: str, seconds: float, keys: str):
    """The attacks in a process of their own."""
    command = [sys.executable, "-m", "tests.unit.sidecar_storm", address, str(seconds), str(FILES // 2), keys]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
        assert process.poll() is None, "the attackers have died"
    finally:
        process.kill()
        process.wait()


async def honest(scorer, seconds: float) -> dict:
    """Ask all the time; return how many verdicts came, the longest wait, and what the host took meanwhile."""
    figures = {"verdicts": 0, "longest_seconds": 0.0, "growth_mb": 0.0, "hosts": 1}
    before = host_of(scorer).memory_info().rss
    until = time.monotonic() + seconds
    done = asyncio.Event()

    async def watch():
        pid = scorer.host.pid
        while not done.is_set():
            with contextlib.suppress(psutil.Error):
                figures["growth_mb"] = max(figures["growth_mb"], (host_of(scorer).memory_info().rss - before) / 1e6)
            if scorer.host.pid != pid:
                pid = scorer.host.pid
                figures["hosts"] += 1
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    number = 0
    while time.monotonic() < until:
        answers = [str(number + i) for i in range(20)]
        number += 20
        began = time.monotonic()
        assert await ask(scorer, answers) == numbers(answers)
        figures["longest_seconds"] = max(figures["longest_seconds"], time.monotonic() - began)
        figures["verdicts"] += 20
    done.set()
    await watcher
    return {key: round(value, 2) for key, value in figures.items()}


def weather(node, tmp_path, seconds: float) -> dict:
    """A storm of so many seconds on a host, and what the honest client saw."""
    keys = str(sidecar_keys.make(tmp_path / "keys"))
    bind = free_address()
    config = rewards("Number", workers=1, args={"seconds": 0.001}, timeout=5.0)
    with sidecar.connect(config, node, bind=bind, keys=keys) as scorer:
        host = host_of(scorer)
        soft, hard = host.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard
        host.rlimit(psutil.RLIMIT_NOFILE, (FILES, hard))
        with attacked(bind, seconds + 5, keys):
            figures = asyncio.run(honest(scorer, seconds))
        figures["refused"] = fetch_status(bind, ClientKeys.load(keys)).refused_keys
    print("\n" + json.dumps({"seconds": seconds} | figures))
    return figures


def test_a_squall(node, tmp_path):
    """The host takes buffers of what is sent at once, and no more after five minutes."""
    figures = weather(node, tmp_path, 10.0)
    assert figures["verdicts"] >= 100 and figures["longest_seconds"] < patient(10) and figures["refused"] > 0
    assert figures["growth_mb"] < 96 and figures["hosts"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_storm_of_five_minutes(node, tmp_path):
    figures = weather(node, tmp_path, 300.0)
    assert figures["verdicts"] > 1000 and figures["growth_mb"] < 96
    assert figures["hosts"] == 1 and figures["longest_seconds"] < patient(20)
