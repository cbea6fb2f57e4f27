"""All attacks on the wire at once, beside honest clients: the host lives, and their verdicts arrive and are right."""

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
from tests.patience import patient
from tests.unit.sidecar_helpers import ask, free_address, host_of, numbers, private_node, rewards

ROOT = Path(__file__).parents[2]
NO_KEY, KEY = ("garbage", "hang_up", "silence"), ("large_parts", "tiny_parts", "large_frames", "bombs", "deafness")


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


@contextlib.contextmanager
def attacked(address: str, seconds: float, keys: str, *groups: tuple[str, ...]):
    """One process for each group of attacks."""
    command = [sys.executable, "-m", "tests.unit.sidecar_storm", address, str(seconds), keys]
    processes = [subprocess.Popen([*command, *names], cwd=ROOT, stderr=subprocess.DEVNULL) for names in groups]
    try:
        yield
    finally:
        for process in processes:
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


def weather(node, tmp_path, keyed: bool, seconds: float) -> dict:
    """A storm of so many seconds on a host, and what the honest client saw."""
    keys = str(tmp_path / "keys") if keyed else None
    if keyed:
        sidecar_keys.make(tmp_path / "keys", "bad")
    bind = free_address() if keyed else "ipc"
    address = bind if keyed else node.address
    config = rewards("Number", workers=1, args={"seconds": 0.001}, timeout=5.0)
    with sidecar.connect(config, node, bind=bind, keys=keys) as scorer:
        key = f"{keys}/bad" if keyed else "-"
        with attacked(address, seconds + 5, key, NO_KEY, KEY, *([("bad_nodes",)] if keyed else [])):
            figures = asyncio.run(honest(scorer, seconds))
    print("\n" + json.dumps({"keyed": keyed, "seconds": seconds} | figures))
    return figures


@pytest.mark.parametrize("keyed", [False, True], ids=["ipc", "keys"])
def test_a_squall(node, tmp_path, keyed):
    """With keys, bad nodes take work, which comes back after its time limit of 5 s: then an honest client is slow, but
    never waits for much longer. (The more of the machine the attackers get, the slower.)

    What the host takes is buffers of what is sent at once: 50 to 62 MB after seconds, and no more after five minutes.
    """
    figures = weather(node, tmp_path, keyed, 10.0)
    assert figures["verdicts"] >= (40 if keyed else 100) and figures["longest_seconds"] < patient(10)
    assert figures["growth_mb"] < 96 and figures["hosts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [False, True], ids=["ipc", "keys"])
def test_a_storm_of_five_minutes(node, tmp_path, keyed):
    figures = weather(node, tmp_path, keyed, 300.0)
    assert figures["verdicts"] > 1000 and figures["growth_mb"] < 64
    assert figures["hosts"] == 1 and figures["longest_seconds"] < patient(20)
