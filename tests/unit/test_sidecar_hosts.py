"""Hosts that were started by hand, on machines without ranks: they take their share, whoever of them is killed."""

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

from launch import sidecar_keys
from spmd_rl import sidecar
from spmd_rl.base.curve_keys import ClientKeys
from spmd_rl.base.errors import UserError
from spmd_rl.config.sections.run import SidecarConfig
from spmd_rl.sidecar.__main__ import main
from spmd_rl.sidecar.status import fetch_status
from tests.patience import patient
from tests.unit.sidecar_helpers import ask, free_address, gone_within, host_of, numbers, private_node, rewards
from tests.unit.test_sessions import envs, expected, play_all

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SLOW = ["reward.toy.target=sidecar_toys:Number", "reward.toy.args.seconds=0.02"]
ANSWERS = [str(i) for i in range(150)]  # three seconds of work for one worker


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


@pytest.fixture
def config():
    return rewards("Number", workers=1, args={"seconds": 0.02})


@contextlib.contextmanager
def by_hand(address: str, *words: str, keys: Path | None = None):
    """`python -m spmd_rl.sidecar --bind`, once it serves."""
    command = [sys.executable, "-m", "spmd_rl.sidecar", "--bind", address, *(["--keys", str(keys)] if keys else [])]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    process = subprocess.Popen(
        [*command, "agentic", *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert "serving" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def connect(config, node, *hosts: str, **options):
    """Connect a scorer to its own host and these."""
    return sidecar.connect_both(config, None, node, hosts=hosts, **options)


async def until_all_answer(client) -> None:
    """Wait until each of the client's hosts has answered."""
    await ask(client, ["a"])
    deadline = time.monotonic() + patient(10)
    while not all(link.answers for link in client.links):
        assert time.monotonic() < deadline, "a host does not answer"
        await asyncio.sleep(0.02)


async def ask_while(scorer, answers, disturb) -> list:
    await until_all_answer(scorer)
    task = asyncio.create_task(ask(scorer, answers))
    await asyncio.sleep(0.4)
    disturb()
    return await task


def test_verdicts_are_spread_by_the_number_of_workers(node, config, tmp_path):
    keys, bind = sidecar_keys.make(tmp_path / "keys"), free_address()
    with by_hand(bind, *SLOW, "reward.toy.workers=2", "policy.model=any", keys=keys) as remote:
        with connect(config, node, bind, keys=str(keys)) as (scorer, _):
            assert asyncio.run(ask_while(scorer, ANSWERS, lambda: None)) == numbers(ANSWERS)
            family = [psutil.Process(remote.pid), *psutil.Process(remote.pid).children(recursive=True)]
            assert len(family) == 5  # host, keeper, fork server, two workers
            there = fetch_status(bind, ClientKeys.load(keys)).pools["toy"].verdicts
            assert len(ANSWERS) / 2 < there < 0.8 * len(ANSWERS)
        remote.send_signal(signal.SIGINT)
        assert remote.wait(10) == 0 and gone_within(family, 2.0)


def test_environments_are_spread_and_stay_where_they_began(node):
    bind, settings = free_address(), envs("Counts", workers=1, args={"seconds": 0.01})
    words = ["env.toy.target=session_toys:Counts", "env.toy.args.seconds=0.01", "env.toy.workers=1"]
    words.append(f"env.toy.envs_per_worker={settings.tags['toy'].envs_per_worker}")
    with by_hand(bind, *words), sidecar.connect_both(None, settings, node, hosts=[bind]) as (_, environments):

        async def run():
            await play_all(environments, range(1))
            await asyncio.sleep(0.3)
            return await play_all(environments, range(60))

        assert asyncio.run(run()) == expected(range(60))
        assert fetch_status(bind, None).envs["toy"].verdicts > 60
        assert fetch_status(node.address, None).envs["toy"].verdicts > 60
        assert fetch_status(bind, None).envs["toy"].running == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_host_that_is_gone_has_its_calls_made_once_more_elsewhere(node, config, how):
    """Killed: found at once. Asked to end: it answers what it has. Stopped: after five seconds of silence."""
    bind = free_address()
    with by_hand(bind, *SLOW) as remote, connect(config, node, bind) as (scorer, _):
        own, start = host_of(scorer), time.monotonic()
        assert asyncio.run(ask_while(scorer, ANSWERS, lambda: remote.send_signal(how))) == numbers(ANSWERS)
        assert time.monotonic() - start < patient(20) and host_of(scorer) == own
        if how == signal.SIGTERM:
            assert remote.wait(5.0) == 0
        assert asyncio.run(ask(scorer, ["b"])) == numbers(["b"])


def test_a_host_that_comes_later_is_used(node, config):
    bind = free_address()
    with connect(config, node, bind) as (scorer, _):
        assert asyncio.run(ask(scorer, ["a"])) == numbers(["a"])
        for _ in range(2):
            with by_hand(bind, *SLOW):
                assert asyncio.run(ask_while(scorer, ANSWERS, lambda: None)) == numbers(ANSWERS)
                assert fetch_status(bind, None).pools["toy"].verdicts > len(ANSWERS) / 4


def test_a_host_with_other_settings_is_not_used(node, config, capfd):
    bind = free_address()
    with by_hand(bind, "reward.toy.target=sidecar_toys:Moody"), connect(config, node, bind) as (scorer, _):
        assert asyncio.run(ask_while(scorer, ANSWERS, lambda: None)) == numbers(ANSWERS)
        assert fetch_status(bind, None).pools["toy"].verdicts == 0
    assert capfd.readouterr().err.count(f"{bind} has other settings of toy than this run") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--bind", "tcp://127.0.0.1:1"], "needs the run's pipeline"),
        (["--bind", "tcp://127.0.0.1:1", "reward.a.target=a:B"], "needs the run's pipeline"),
        (["--bind", "tcp://127.0.0.1:1", "rlvr"], "name no reward.<domain>.target"),
        (["--bind", "tcp://127.0.0.1:1", "rlvr", "rewrd.a.target=a:B"], "rewrd.a.target: unknown key"),
        (["--bind", "tcp://*:5555", "rlvr", "reward.a.target=a:B"], "needs sidecar.keys"),
        (["--bind", "tcp://*:5555", "--keys", "/nowhere", "rlvr", "reward.a.target=a:B"], "/nowhere"),
        (["--bind", "tcp://127.0.0.1:1", "rlvr", "reward.a.target=nowhere:B"], "No module named 'nowhere'"),
        (["--status", "nonsense"], "--status: nonsense"),
        (["--status", "tcp://a:1", "--bind", "tcp://a:1"], "not allowed with"),
        ([], "required"),
    ],
)
def test_lines_that_cannot_be(words, line, capfd):
    try:
        code = main(words)
    except SystemExit as end:  # of a line that says what no option may be
        code = end.code
    assert code == 2 and line in capfd.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "line"), [(["cpu1:5555"], "must be tcp://HOST:PORT"), (["tcp://cpu1:5555"], "needs sidecar.keys")]
)
def test_lists_of_hosts_that_cannot_be(hosts, line):
    with pytest.raises(UserError, match=f"^hosts: .*{line}"):
        SidecarConfig(hosts=hosts)


def test_status(node, capsys):
    config = rewards("Moody", workers=2)
    with sidecar.connect(config, node) as scorer:
        asyncio.run(ask(scorer, ["a", "die", "b"]))
        assert main(["--status", node.address]) == 0
        table = capsys.readouterr().out
        assert f"host {host_of(scorer).pid}: serving" in table and "sidecar_toys:Moody" in table
        assert main(["--status", node.address, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
    toy = report["pools"]["toy"]
    assert (toy["workers"], toy["verdicts"], toy["queued"], toy["running"]) == (2, 3, 0, 0)
    assert toy["deaths"] >= 2 and report["uptime_seconds"] > 0
