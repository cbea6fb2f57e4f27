"""The sidecar on real processes: verdicts as a pure function of the answers, whatever is killed, sent or broken."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from spmd_rl import sidecar
from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import RewardConfig, RewardsConfig
from spmd_rl.sidecar import wire
from spmd_rl.types import Node, Verdict
from tests.patience import patient
from tests.unit.sidecar_helpers import ask, gone_within, host_of, numbers, private_node, rewards, workers_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


# -- what it does -----------------------------------------------------------------------------------------------------


def test_verdicts_come_back_to_their_answers(node):
    answers = [str(i) for i in range(3000)]  # more than the window
    with sidecar.connect(rewards("Number", workers=2), node) as scorer:
        assert asyncio.run(ask(scorer, answers)) == numbers(answers)
        assert asyncio.run(ask(scorer, answers[:10])) == numbers(answers[:10])  # another loop
        assert scorer.outstanding == 0
        processes = [host_of(scorer), *host_of(scorer).children(recursive=True)]
        assert len(processes) == 5  # host, keeper, fork server, two workers
    assert gone_within(processes, 2.0)
    assert not Path(node.address.removeprefix("ipc://")).parent.exists()


def test_a_breakpoint_in_a_worker_says_where_it_works(node):
    with sidecar.connect(rewards("Stops"), node) as scorer:
        (verdict,) = asyncio.run(ask(scorer, ["a"]))
    assert verdict.status == "error" and "debug=true" in verdict.detail


def test_ranks_of_a_node_share_a_host(node):
    with (
        sidecar.connect(rewards("Number"), node) as first,
        sidecar.connect(rewards("Number"), Node(1, 1, node.address)) as second,
    ):

        async def both():
            return await asyncio.gather(ask(first, ["a", "b"]), ask(second, ["c", "b"]))

        assert asyncio.run(both()) == [numbers(["a", "b"]), numbers(["c", "b"])]


def test_loopback_tcp(node):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with sidecar.connect(rewards("Number"), node, bind=f"tcp://127.0.0.1:{port}") as scorer:
        assert asyncio.run(ask(scorer, ["a"])) == numbers(["a"])


@pytest.mark.slow
def test_throughput(node):
    answers = [str(i % 7) for i in range(10_000)]
    with sidecar.connect(rewards("Number"), node) as scorer:
        asyncio.run(ask(scorer, answers[:500]))
        start = time.perf_counter()
        asyncio.run(ask(scorer, answers))
        rate = len(answers) / (time.perf_counter() - start)
    print(f"\n{rate:.0f} verdicts/s")
    assert rate > 500


def test_domains_have_pools_of_their_own(node):
    config = rewards("Number", domain="slow", args={"seconds": 1.5})
    config.domains |= rewards("Number", domain="fast").domains

    async def race(scorer):
        slow = asyncio.create_task(ask(scorer, ["a", "b"], "slow"))
        assert await ask(scorer, ["c"] * 50, "fast") == numbers(["c"] * 50)
        assert not slow.done()
        assert await slow == numbers(["a", "b"])

    with sidecar.connect(config, node) as scorer:
        asyncio.run(race(scorer))


def test_async_rewarders_nap_side_by_side(node):
    with sidecar.connect(rewards("Async", timeout=1.0), node) as scorer:
        start = time.perf_counter()
        verdicts = asyncio.run(ask(scorer, ["0.4"] * 20 + ["30"]))
        assert time.perf_counter() - start < patient(5)
    assert [verdict.status for verdict in verdicts] == ["ok"] * 20 + ["timeout"]


def test_batch_rewarders_get_lists(node):
    async def calls(scorer):
        return await ask(scorer, ["a"]), await ask(scorer, [*"abcdefgh", "bad", "die", *"ijkl"])

    with sidecar.connect(rewards("Batch"), node) as scorer:
        single, verdicts = asyncio.run(calls(scorer))
    assert single[0].parts == {"batch": 1.0}
    assert [verdict.status for verdict in verdicts] == ["ok"] * 8 + ["error"] * 2 + ["ok"] * 4
    assert "a bad one" in verdicts[8].detail and "fresh" in verdicts[9].detail


def test_a_called_off_answer_is_forgotten(node):
    async def call_off(scorer):
        tasks = [asyncio.create_task(ask(scorer, ["sleep 0.3"])) for _ in range(100)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert scorer.outstanding == 0
        start = time.perf_counter()
        await ask(scorer, ["quick"])
        return time.perf_counter() - start

    with sidecar.connect(rewards("Moody"), node) as scorer:
        assert asyncio.run(call_off(scorer)) < patient(2.0)  # not behind a hundred naps


# -- what a rewarder may do -------------------------------------------------------------------------------------------


def test_each_sample_gets_an_honest_verdict(node):
    answers = ["a", "raise", "nan", "none", "format", "sleep 30", "die", "exit", "print", "z"]
    with sidecar.connect(rewards("Moody", timeout=1.0), node) as scorer:
        verdicts = asyncio.run(ask(scorer, answers))
    assert [verdict.status for verdict in verdicts] == [
        "ok", "error", "error", "error", "wrong_format", "timeout", "error", "error", "ok", "ok",
    ]  # fmt: skip
    assert verdicts[1].detail == "sidecar_toys.py:36: KeyError: 'no such\\nthing'"
    assert "nan" in verdicts[2].detail and "NoneType" in verdicts[3].detail
    assert "1 s" in verdicts[5].detail and "fresh" in verdicts[6].detail
    assert not any("\n" in verdict.detail for verdict in verdicts)


def test_a_timeout_holds_up_nobody_else(node):
    answers = ["sleep 30"] * 2 + [str(i) for i in range(200)]
    start = time.perf_counter()
    with sidecar.connect(rewards("Moody", workers=2, timeout=1.0), node) as scorer:
        verdicts = asyncio.run(ask(scorer, answers))
    assert [verdict.status for verdict in verdicts] == ["timeout"] * 2 + ["ok"] * 200
    assert time.perf_counter() - start < patient(10)


def test_waiting_for_a_worker_is_no_timeout(node):
    answers = [f"sleep 0.1 {i}".rsplit(" ", 1)[0] for i in range(15)]
    with sidecar.connect(rewards("Moody", timeout=0.6), node) as scorer:
        assert {verdict.status for verdict in asyncio.run(ask(scorer, answers))} == {"ok"}


def test_a_sample_is_condemned_only_if_it_kills_a_fresh_worker_too(node, tmp_path):
    answers = [f"die-once {tmp_path}/{i}" for i in range(3)] + ["die"] + ["a"] * 50
    with sidecar.connect(rewards("Moody", workers=2), node) as scorer:
        verdicts = asyncio.run(ask(scorer, answers))
    assert [verdict.status for verdict in verdicts] == ["ok"] * 3 + ["error"] + ["ok"] * 50


def test_what_is_too_large_or_has_no_form_is_said_so(node):
    with sidecar.connect(rewards("Moody"), node) as scorer:
        large, surrogate, fine = asyncio.run(ask(scorer, ["x" * wire.MAX_INPUT_BYTES, "\ud800", "x" * 1_000_000]))
        (unknown,) = asyncio.run(ask(scorer, ["a"], domain="other"))
    assert (large.status, surrogate.status, fine.status, unknown.status) == ("rejected", "error", "ok", "error")
    assert "reward.other" in unknown.detail


def test_workers_are_processes_without_torch(node):
    with sidecar.connect(rewards("Where"), node) as scorer:
        (verdict,) = asyncio.run(ask(scorer, ["a"]))
        assert [worker.pid for worker in workers_of(scorer)] == [verdict.score]
    assert verdict.parts == {"torch": 0.0}


# -- a user's mistakes and a user's own -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("nowhere:Reward", "No module named 'nowhere'"),
        ("sidecar_toys:Nothing", "has no class Nothing"),
        ("sidecar_toys:Path", "neither `score` nor"),
        ("sidecar_toys:CannotBuild", "the model is not there"),
        ("sidecar_toys:NeedsEmbed", "`embed` service"),
        ("sidecar_toys:DiesAtBuild", "its worker dies"),
    ],
)
def test_a_target_that_cannot_be_had_is_one_line(node, target, line):
    config = RewardsConfig(domains={"toy": RewardConfig(target=target)})
    with pytest.raises(UserError) as error, sidecar.connect(config, node):
        pass
    assert str(error.value).startswith(f"reward.toy.target: {target}") and line in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path(node.address.removeprefix("ipc://")).exists()


def test_arguments_that_do_not_fit_are_named(node):
    line = r"reward\.toy\.args=.*unexpected keyword"
    with pytest.raises(UserError, match=line), sidecar.connect(rewards("Number", args={"a": 1}), node):
        pass
    with pytest.raises(UserError, match="cannot be sent"), sidecar.connect(rewards("Number", args={"a": {1j}}), node):
        pass


@pytest.mark.parametrize(
    ("bind", "line"),
    [
        ("tcp://0.0.0.0:5555", "CURVE"),
        ("tcp://10.0.0.1:5555", "CURVE"),
        ("tcp://*:5555", "CURVE"),
        ("tcp://127.0.0.1", "port"),
        ("ipc://relative/path", "must be ipc or"),
        ("ipc:///" + "x" * 120, "longer"),
    ],
)
def test_only_private_addresses_are_served(node, bind, line):
    with pytest.raises(UserError, match=line), sidecar.connect(rewards("Moody"), node, bind=bind):
        pass


def test_a_directory_that_others_can_enter_is_refused(node):
    directory = Path(node.address.removeprefix("ipc://")).parent
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(UserError, match="0700"), sidecar.connect(rewards("Moody"), node):
        pass
    directory.rmdir()
    directory.symlink_to(tempfile.mkdtemp(dir=directory.parent))
    with pytest.raises(UserError, match="0700"), sidecar.connect(rewards("Moody"), node):
        pass


def test_the_directory_is_private(node):
    with sidecar.connect(rewards("Moody"), node):
        assert Path(node.address.removeprefix("ipc://")).parent.stat().st_mode & 0o777 == 0o700


def test_domains_without_a_rewarder():
    sidecar.check_domains(["toy", "toy"], rewards("Moody"))
    with pytest.raises(UserError, match=r"no reward\.code\.target is set.*set: toy"):
        sidecar.check_domains(["toy", "code"], rewards("Moody"))


def test_debug_scores_in_this_process(node):
    before = psutil.Process().children()
    with sidecar.connect(rewards("Where"), node, debug=True) as scorer:
        assert asyncio.run(ask(scorer, ["a"]))[0].score == os.getpid()
    with sidecar.connect(rewards("Async"), node, debug=True) as scorer:
        assert asyncio.run(ask(scorer, ["0.01"])) == [Verdict("ok", 0.01)]
    with sidecar.connect(rewards("Batch"), node, debug=True) as scorer:
        assert asyncio.run(ask(scorer, ["a"]))[0].status == "ok"
    with sidecar.connect(rewards("Moody"), node, debug=True) as scorer:
        assert asyncio.run(ask(scorer, ["raise"]))[0].status == "error"
    assert psutil.Process().children() == before
    with pytest.raises(UserError, match="cannot be built"), sidecar.connect(rewards("CannotBuild"), node, debug=True):
        pass


def test_your_own_reward_in_one_file(tmp_path, monkeypatch, node):
    (tmp_path / "my_reward.py").write_text(
        textwrap.dedent("""
        from spmd_rl.types import AnswerInfo, Prompt, Verdict

        class LengthReward:
            def __init__(self, target: int = 20) -> None:
                self.target = target

            def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
                miss = abs(len(answer) - self.target) / self.target
                return Verdict("ok", max(0.0, 1.0 - miss), {"miss": miss})
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RewardsConfig(domains={"toy": RewardConfig("my_reward:LengthReward", args={"target": 10})})
    with sidecar.connect(config, node) as scorer:
        verdicts = asyncio.run(ask(scorer, ["x" * 10, "x" * 5, ""]))
    assert [verdict.score for verdict in verdicts] == [1.0, 0.5, 0.0]


def test_nothing_here_imports_torch():
    modules = "spmd_rl.sidecar, spmd_rl.sidecar.__main__, spmd_rl.sidecar.forkserver, launch.sidecar_keys"
    check = f"import sys, {modules}, rewards.math_verify, rewards.reasoning_gym; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)


def test_a_host_starts_soon(node):
    best = 9.0
    for _ in range(2):
        start = time.perf_counter()
        with sidecar.connect(rewards("Moody"), node):
            best = min(best, time.perf_counter() - start)
    print(f"\n{best:.2f} s until a worker is ready")
    assert best < patient(2)


# -- placement --------------------------------------------------------------------------------------------------------


def test_workers_keep_to_their_processors(node):
    mine = sorted(os.sched_getaffinity(0))
    with sidecar.connect(rewards("Number", cpus=f"{mine[-1]}-{mine[-1]}"), node) as scorer:
        assert [worker.cpu_affinity() for worker in workers_of(scorer)] == [[mine[-1]]]
        assert sorted(host_of(scorer).cpu_affinity()) == mine


def test_processors_that_there_are_not_are_a_users_mistake(node):
    with pytest.raises(UserError, match=r"reward\.toy\.cpus=0-4095: this run may not use processor"):
        with sidecar.connect(rewards("Number", cpus="0-4095"), node):
            pass


@pytest.mark.parametrize(("cpus", "numbers"), [(None, []), ("3", [3]), ("0-2,8,1-3", [0, 1, 2, 3, 8])])
def test_processors_by_number(cpus, numbers):
    assert RewardConfig(target="a:B", cpus=cpus).cpu_numbers == numbers


@pytest.mark.parametrize("cpus", ["", "a", "1-", "1,,2", "-1"])
def test_processors_that_are_no_numbers(cpus):
    with pytest.raises(UserError, match="cpus: must be like 0-3,8"):
        RewardConfig(target="a:B", cpus=cpus)
