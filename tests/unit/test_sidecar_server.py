"""A judge's server on named devices: started by the host, looked after, ended with it; failures are never zeros."""

import asyncio
import json
import socket
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from spmd_rl import sidecar
from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import RewardConfig, RewardsConfig
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.frames import receive_frame, send_frame
from spmd_rl.sidecar.reward_server import free_port
from spmd_rl.types import Verdict
from tests.engines import VLLM_SIZES
from tests.models import tiny
from tests.patience import patient
from tests.unit.sidecar_helpers import ask, gone_within, host_of, judged, private_node

HERE = Path(__file__).parent
SERVING = ("vllm", "uvicorn", "watchfiles", "prometheus_fastapi_instrumentator", "model_hosting_container_standards")
YES = Verdict("ok", 1.0, {"judge": 1.0})


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


def told(notes: Path) -> list[dict]:
    """What each server that has served so far said of itself."""
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def processes(notes: Path) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in told(notes)[-1]["pids"]]


def wait_for(notes: Path, number: int, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + patient(seconds)
    while len(told(notes)) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_host_starts_the_server_and_ends_it(node, tmp_path):
    notes = tmp_path / "notes"
    with sidecar.connect(judged(notes, "slow"), node) as scorer:
        assert asyncio.run(ask(scorer, [str(number) for number in range(40)])) == [YES] * 40
        server, helper = processes(notes)
        assert host_of(scorer) in server.parents() and len(told(notes)) == 1
    assert gone_within([server, helper], 3.0)


@pytest.mark.parametrize(("devices", "seen"), [("cpu", ""), ("2,3", "2,3")])
def test_it_sees_the_named_devices_alone_and_nothing_of_the_rank(node, tmp_path, monkeypatch, devices, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("RANK", "3")
    with sidecar.connect(judged(tmp_path / "notes", devices=devices), node):
        (notes,) = told(tmp_path / "notes")
    assert notes["devices"] == dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"), seen
    )
    assert notes["rank"] is None


def test_a_part_of_a_composite_gets_it_too(node, tmp_path):
    config = judged(tmp_path / "notes")
    (reward,) = config.domains.values()
    reward.target = "rewards.composite:CompositeReward"
    reward.args = {"parts": {"judge": {"target": "rewards.judge:JudgeReward", "args": {"model": "m"}}}}
    reward.server = reward.server.replace("{model}", "m")
    with sidecar.connect(config, node) as scorer:
        assert asyncio.run(ask(scorer, ["a"]))[0].score == 1.0


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("dies", "ended with code 1: no such device"),
        ("hangs", "no answer within 1.5 s"),
    ],
)
def test_a_server_that_does_not_start_is_one_line(node, tmp_path, mode, line):
    start = time.monotonic()
    config = judged(tmp_path / "notes", mode, start_seconds=1.5)
    with pytest.raises(UserError) as error, sidecar.connect(config, node):
        pass
    assert str(error.value).startswith("reward.toy.server: ") and str(error.value).endswith(line)
    assert "\n" not in str(error.value) and time.monotonic() - start < patient(10)


def test_a_program_that_is_not_there_is_one_line(node, tmp_path):
    config = judged(tmp_path / "notes")
    config.domains["toy"].server = "no_such_program --port {port}"
    with pytest.raises(UserError, match=r"reward\.toy\.server: .*no_such_program"), sidecar.connect(config, node):
        pass


def test_a_crash_is_an_error_and_the_server_comes_back(node, tmp_path):
    notes = tmp_path / "notes"
    with sidecar.connect(judged(notes), node) as scorer:
        helper = processes(notes)[1]
        (crashed,) = asyncio.run(ask(scorer, ["crash"]))  # each time that it is asked again, too
        assert crashed.status == "error" and not crashed.scored
        assert gone_within([helper], 3.0)
        wait_for(notes, 2)
        time.sleep(0.3)
        assert asyncio.run(ask(scorer, ["fine"])) == [YES]


IMPATIENT = """
    import sys
    from spmd_rl.sidecar import supervisor
    supervisor.HEALTHY_SECONDS = supervisor.REPLY_SECONDS = supervisor.PAUSE_SECONDS = 0.2
    supervisor.main(int(sys.argv[1]))
"""


def test_a_server_that_no_longer_answers_is_replaced(tmp_path):
    notes = tmp_path / "notes"
    command = [sys.executable, str(HERE / "judge_server.py"), "serves", "{port}", "m", str(notes)]
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        supervisor = subprocess.Popen([sys.executable, "-c", textwrap.dedent(IMPATIENT), str(fd)], pass_fds=[fd])
    with ours:
        send_frame(ours, wire.StartServer("toy", wire.ServerSpec(command, "", 10.0), free_port()))
        assert receive_frame(ours, wire.FROM_CHILD) == wire.Ready()
        stuck, helper = processes(notes)
        stuck.suspend()
        wait_for(notes, 2)
        assert gone_within([stuck, helper], 1.0)
        assert receive_nothing(ours)  # the host was told once
        new = processes(notes)
    assert supervisor.wait(5.0) == 0
    assert gone_within(new, 1.0)


def receive_nothing(sock: socket.socket) -> bool:
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    return True


def test_a_killed_host_takes_the_server_with_it_and_changes_no_verdict(node, tmp_path):
    notes = tmp_path / "notes"
    with sidecar.connect(judged(notes, "slow"), node) as scorer:
        old = processes(notes)
        host_of(scorer).kill()
        assert asyncio.run(ask(scorer, ["a", "b"])) == [YES] * 2  # they wait until the new server answers
        assert gone_within(old, 1.0) and len(told(notes)) == 2
        new = processes(notes)
    assert gone_within(new, 3.0)


RANK = """
    import sys, time
    from spmd_rl import sidecar
    from spmd_rl.types import Node
    from tests.unit.sidecar_helpers import Path, judged  # and no torch

    with sidecar.connect(judged(Path(sys.argv[2])), Node(0, 0, sys.argv[1])):
        print("ready", flush=True)
        time.sleep(100)
"""


def test_it_does_not_outlive_the_rank(node, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(RANK), node.address, str(tmp_path / "notes")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=HERE.parents[1]) as rank:
        assert rank.stdout.readline() == b"ready\n"
        family = [*psutil.Process(rank.pid).children(recursive=True), *processes(tmp_path / "notes")]
        rank.kill()
        rank.wait(5.0)
        assert gone_within(family, 3.0)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"devices": "0 1"}, "devices: must be like 2,3 or cpu, not '0 1'"),
        ({"devices": "0", "args": {"url": "http://a/v1", "model": "m"}}, "devices: .* args.url names another"),
        ({"devices": "0", "args": {}}, "server: {model} is replaced by args.model, which is not given"),
        ({"devices": "0", "server": "serve"}, "server: must contain {port}"),
        ({"devices": "0", "server": "serve {port} 'a"}, "server: No closing quotation"),
    ],
)
def test_settings_that_cannot_be(settings, line):
    with pytest.raises(UserError, match=line):
        RewardConfig("rewards.judge:JudgeReward", **{"args": {"model": "m"}, **settings})


def test_the_default_is_vllm():
    reward = RewardConfig("rewards.judge:JudgeReward", args={"model": "/a model/{port}"}, devices="2,3")
    host = ["--host", "127.0.0.1", "--port", "{port}", "--tensor-parallel-size", "2"]
    assert reward.server_command == ["vllm", "serve", "/a model/{port}", *host]
    assert RewardConfig("a:B").server_command == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not all(map(find_spec, SERVING)), reason=f"needs {', '.join(SERVING)}")
def test_a_real_vllm_server(node, tmp_path, monkeypatch):
    """What `vllm serve` runs. A random model says neither YES nor NO, which is an error, and it is it that said so."""
    for name, value in {"CPU_KVCACHE_SPACE": "1", "CPU_OMP_THREADS_BIND": "nobind", "NO_USAGE_STATS": "1"}.items():
        monkeypatch.setenv(f"VLLM_{name}", value)
    model = tiny("llama", tmp_path / "model", **VLLM_SIZES)
    module = "vllm.entrypoints.openai.api_server"
    command = f"python -m {module} --model {{model}} --host 127.0.0.1 --port {{port}} --enforce-eager"
    args = {"model": str(model), "template": "{answer}"}
    reward = RewardConfig(
        "rewards.judge:JudgeReward", args=args, devices="cpu", server=command, timeout=120.0, start_seconds=600.0
    )
    with sidecar.connect(RewardsConfig(domains={"toy": reward}), node) as scorer:
        started = host_of(scorer).children(recursive=True)
        verdicts = asyncio.run(ask(scorer, ["a", "b"]))
    assert all("the judge said neither YES nor NO" in verdict.detail for verdict in verdicts), verdicts
    assert gone_within(started, 5.0)
