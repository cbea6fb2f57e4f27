"""Nodes that attach to a host elsewhere: same verdicts, whoever of them is killed, stopped or sent away."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import zmq

from launch import sidecar_keys
from spmd_rl import sidecar, wire
from spmd_rl.curve_keys import ClientKeys
from spmd_rl.errors import UserError
from spmd_rl.sidecar.__main__ import main
from spmd_rl.sidecar.status import fetch_status
from spmd_rl.sidecar.worker_node import AllowList
from tests import sockets
from tests.patience import patient
from tests.unit.sidecar_helpers import ask, free_address, gone_within, host_of, numbers, private_node, rewards

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


@pytest.fixture
def keys(tmp_path) -> Path:
    sidecar_keys.make(tmp_path / "keys", "cpu7")
    return tmp_path / "keys"


@contextlib.contextmanager
def attached(address: str, keys: Path, *words: str, allow: str = "toy=sidecar_toys:Number", workers: int = 2):
    """`python -m spmd_rl.sidecar --connect` in a process of its own."""
    command = [sys.executable, "-m", "spmd_rl.sidecar", "--connect", address, "--keys", str(keys / "cpu7")]
    command += ["--allow", allow, "--workers", str(workers), *words]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_serving(address: str, keys: Path, num_nodes: int = 1) -> None:
    deadline = time.monotonic() + 30
    while sum(any(n.windows.values()) for n in fetch_status(address, ClientKeys.load(keys)).nodes) < num_nodes:
        assert time.monotonic() < deadline, "no node came"
        time.sleep(0.1)


async def ask_while(scorer, answers, disturb) -> list:
    task = asyncio.create_task(ask(scorer, answers))
    await asyncio.sleep(0.5)
    disturb()
    return await task


SLOW = rewards("Number", workers=1, args={"seconds": 0.02})
ANSWERS = [str(i) for i in range(150)]  # three seconds of work for one worker


def test_a_node_takes_its_share(node, keys):
    bind = free_address()
    with sidecar.connect(SLOW, node, bind=bind, keys=str(keys)) as scorer, attached(bind, keys) as remote:
        until_serving(bind, keys)
        family = [psutil.Process(remote.pid), *psutil.Process(remote.pid).children(recursive=True)]
        assert len(family) == 5  # node, keeper, fork server, two workers
        assert asyncio.run(ask(scorer, ANSWERS)) == numbers(ANSWERS)
        report = fetch_status(bind, ClientKeys.load(keys))
        assert report.pools["toy"].verdicts == len(ANSWERS) and report.in_flight == 0 == report.held_bytes
        assert report.nodes[0].verdicts > len(ANSWERS) / 3 and report.nodes[0].running == 0
    assert remote.returncode == 0 or gone_within(family, 2.0)


def test_a_node_ends_with_the_run(node, keys):
    bind = free_address()
    with contextlib.ExitStack() as stack:
        with sidecar.connect(SLOW, node, bind=bind, keys=str(keys)):
            remote = stack.enter_context(attached(bind, keys))
            until_serving(bind, keys)
            family = psutil.Process(remote.pid).children(recursive=True)
        assert remote.wait(5.0) == 0
        assert gone_within(family, 2.0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_node_that_is_lost_loses_nothing(node, keys, how):
    """Killed: found at once. Asked to end: it answers what it has. Stopped: its lease runs out."""
    bind = free_address()
    with sidecar.connect(SLOW, node, bind=bind, keys=str(keys)) as scorer, attached(bind, keys) as remote:
        until_serving(bind, keys)
        host = host_of(scorer)
        start = time.monotonic()
        assert asyncio.run(ask_while(scorer, ANSWERS, lambda: remote.send_signal(how))) == numbers(ANSWERS)
        print(f"\n{how.name}: {time.monotonic() - start:.1f} s")
        assert time.monotonic() - start < patient(20)
        report = fetch_status(bind, ClientKeys.load(keys))
        assert report.pools["toy"].verdicts >= len(ANSWERS) and report.nodes == []
        assert host_of(scorer) == host
        if how == signal.SIGTERM:
            assert remote.wait(5.0) == 0


def test_a_node_joins_the_host_that_follows(node, keys):
    bind = free_address()
    with sidecar.connect(SLOW, node, bind=bind, keys=str(keys)) as scorer, attached(bind, keys) as remote:
        until_serving(bind, keys)
        assert asyncio.run(ask_while(scorer, ANSWERS, host_of(scorer).kill)) == numbers(ANSWERS)
        until_serving(bind, keys)
        assert asyncio.run(ask(scorer, ANSWERS)) == numbers(ANSWERS)
        assert fetch_status(bind, ClientKeys.load(keys)).nodes[0].verdicts > len(ANSWERS) / 6
        assert remote.poll() is None


def test_a_node_condemns_what_kills_its_workers(node, keys):
    bind = free_address()
    answers = ["a", "die", "raise", "sleep 30"] * 3
    config = rewards("Moody", workers=1, timeout=1.0)
    with sidecar.connect(config, node, bind=bind, keys=str(keys)) as scorer:
        with attached(bind, keys, allow="toy=sidecar_toys:Moody") as remote:
            until_serving(bind, keys)
            verdicts = asyncio.run(ask(scorer, answers))
            assert remote.poll() is None
    assert [verdict.status for verdict in verdicts] == ["ok", "error", "error", "timeout"] * 3


# -- what a host may ask of a node ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "line"),
    [
        ("toy=sidecar_toys:Moody", "reward.toy.target is sidecar_toys:Number, not sidecar_toys:Moody"),
        ("other=sidecar_toys:Number", "nothing to do in other"),
    ],
)
def test_a_node_imports_what_it_allows_and_nothing_else(node, keys, allow, line):
    bind = free_address()
    with sidecar.connect(rewards("Number"), node, bind=bind, keys=str(keys)) as scorer:
        with attached(bind, keys, allow=allow) as remote:
            assert remote.wait(20) == 2
            assert line in remote.stderr.read()
        assert asyncio.run(ask(scorer, ["a"])) == numbers(["a"])


def test_what_arguments_name_is_imported_too():
    parts = {"parts": {"a": {"target": "os:System", "weight": 1}, "b": [{"target": "rewards.format:FormatReward"}]}}
    spec = wire.PoolSpec("rewards.composite:CompositeReward", parts | {"url": "http://host:80/v1"}, 1)
    known = "m=rewards.composite:CompositeReward,rewards.format:FormatReward"
    with pytest.raises(UserError, match=r"reward\.m\.args name os:System"):
        AllowList([known]).check("m", spec)
    AllowList([f"{known},os:System"]).check("m", spec)
    with pytest.raises(UserError, match=r"target is rewards\.composite"):
        AllowList(["m=os:System,rewards.composite:CompositeReward"]).check("m", spec)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--connect", "tcp://a:1"], "needs --keys"),
        (["--connect", "tcp://a:1", "--keys", "k", "--allow", "math"], "--allow: must be"),
        (["--connect", "tcp://a:1", "--keys", "k", "--allow", "m=a:B", "--workers", "0"], "--workers"),
        (["--connect", "tcp://a:1", "--keys", "/nowhere", "--allow", "m=a:B"], "--keys: /nowhere"),
        (["--status", "nonsense"], "--status: nonsense"),
        (["--status", "tcp://a:1", "--connect", "tcp://a:1"], "not allowed with"),
        ([], "required"),
    ],
)
def test_lines_that_cannot_be(words, line, capsys):
    try:
        code = main(words)
    except SystemExit as end:  # of a line that says what no option may be
        code = end.code
    assert code == 2 and line in capsys.readouterr().err


def test_nobody_serves_a_host_without_keys(node):
    with sidecar.connect(rewards("Number"), node), sockets.context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(node.address)
        for frame in (
            wire.NodeJoin("x", ["toy"]),
            wire.NodeHeartbeat("x", {"toy": 9}, []),
            wire.Goodbye(),
            wire.ScoreReplies([]),
        ):
            dealer.send(wire.encode(frame))
            assert "worker nodes join only" in wire.TO_CLIENT.decode(dealer.recv()).detail


# -- the status -------------------------------------------------------------------------------------------------------


def test_status(node, capsys):
    config = rewards("Moody", workers=2)
    with sidecar.connect(config, node) as scorer:
        asyncio.run(ask(scorer, ["a", "die", "b"]))
        assert main(["--status", node.address]) == 0
        table = capsys.readouterr().out
        assert f"pid {host_of(scorer).pid}: serving" in table and "sidecar_toys:Moody" in table
        assert main(["--status", node.address, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
    toy = report["pools"]["toy"]
    assert (toy["workers"], toy["verdicts"], toy["queued"], toy["running"]) == (2, 3, 0, 0)
    assert toy["deaths"] >= 2 and report["uptime_seconds"] > 0 and report["nodes"] == []
