"""Sessions on real processes: episodes are a pure function of seed and actions, whatever the mode and the workers."""

import asyncio
import contextlib
import os
import time
from pathlib import Path

import psutil
import pytest

from spmd_rl import sidecar
from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import RewardsConfig
from spmd_rl.config.sections.env import EnvConfig, EnvsConfig
from spmd_rl.sidecar.status import fetch_status, to_table
from spmd_rl.types import Node, SessionLost
from tests.patience import patient
from tests.unit.sidecar_helpers import ask, gone_within, host_of, numbers, private_node, rewards, workers_of

MODES = ("thread", "process")


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


def envs(target: str, **settings) -> EnvsConfig:
    settings = {"envs_per_worker": 4} | settings
    return EnvsConfig(tags={"toy": EnvConfig(target=f"session_toys:{target}", **settings)})


async def play(environments, seed: int, actions=("a", "bb", "ccc")) -> list:
    """All observations of an episode, or its observations until it was lost and then why."""
    seen = []
    try:
        session = await environments.reset("toy", seed)
        seen.append(session.reply.observation)
        for action in actions:
            seen.append((await session.step(action)).observation)
        await session.close()
    except SessionLost as lost:
        seen.append(lost)
        with contextlib.suppress(UnboundLocalError):
            await session.close()
    return seen


def reasons(episodes: list[list]) -> list[str]:
    return [getattr(episode[-1], "reason", "ok") for episode in episodes]


async def play_all(environments, seeds, actions=("a", "bb", "ccc")) -> list[list]:
    return await asyncio.gather(*(play(environments, seed, actions) for seed in seeds))


def expected(seeds) -> list[list[str]]:
    return [[f"at {seed % 1000 + n}" for n in (0, 1, 3, 6)] for seed in seeds]


# -- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "workers"), [("thread", 1), ("thread", 3), ("process", 2)])
def test_hundreds_of_episodes(node, mode, workers):
    seeds, woken = [7 * i for i in range(300)], []
    with sidecar.connect_environments(envs("Counts", mode=mode, workers=workers), node) as environments:
        environments.on_reply = lambda: woken.append(environments.outstanding)
        assert asyncio.run(play_all(environments, seeds)) == expected(seeds)
        assert asyncio.run(play_all(environments, seeds[:5])) == expected(seeds[:5])  # another loop
        assert environments.outstanding == 0 and woken
        status = fetch_status(node.address, None).envs["toy"]
        assert (status.running, status.queued, status.deaths) == (0, 0, 0) and status.verdicts == 4 * 305
        assert "session_toys:Counts" in to_table(fetch_status(node.address, None))
        processes = [host_of(environments), *host_of(environments).children(recursive=True)]
        assert len(processes) == 3 + workers * (4 if mode == "process" else 1)  # host, keeper, fork server, workers
    assert gone_within(processes, 2.0)


def test_one_host_for_rewards_and_environments(node):
    both = rewards("Number"), envs("Counts")
    with (
        sidecar.connect_both(*both, node) as (scorer, environments),
        sidecar.connect_both(*both, Node(1, 1, node.address)) as (_, others),
    ):

        async def run():
            return await asyncio.gather(ask(scorer, ["a"]), play_all(environments, [1, 2]), play_all(others, [3]))

        assert asyncio.run(run()) == [numbers(["a"]), expected([1, 2]), expected([3])]


def test_debug_plays_here(node):
    with sidecar.connect_environments(envs("Counts"), node, debug=True) as environments:
        assert asyncio.run(play_all(environments, range(20))) == expected(range(20))
    with sidecar.connect_environments(envs("Moody"), node, debug=True) as environments:
        (episode,) = asyncio.run(play_all(environments, [1], ["a", "raise"]))
        assert episode[0].startswith(str(os.getpid())) and episode[1] == "fine"
        assert episode[2].reason == "error" and "session_toys.py" in episode[2].detail
        assert environments.outstanding == 0


@pytest.mark.parametrize("debug", [False, True])
def test_async_environments(node, debug):
    with sidecar.connect_environments(envs("Async"), node, debug=debug) as environments:
        start = time.perf_counter()
        assert asyncio.run(play_all(environments, range(4))) == [["begun", "a", "bb", "ccc"]] * 4
        assert time.perf_counter() - start < patient(2.0)


def test_held_out_episodes_have_arguments_of_their_own(node):
    settings = envs("Counts", args={"goal": 5}, eval_args={"goal": 9})

    async def run(environments):
        train, held_out = [await environments.reset("toy", 1, held_out) for held_out in (False, True)]
        again = await environments.reset("toy", 1)
        return [session.reply.info["instruction"] for session in (train, held_out, again)]

    for debug in (False, True):
        with sidecar.connect_environments(settings, node, debug=debug) as environments:
            assert asyncio.run(run(environments)) == ["reach 5", "reach 9", "reach 5"]


def test_a_function_makes_an_environment_and_services_are_given(node):
    with sidecar.connect_environments(envs("make", args={"goal": 4}), node) as environments:
        assert asyncio.run(play_all(environments, [1])) == expected([1])
    with sidecar.connect_environments(envs("NeedsSandbox"), node) as environments:
        ((http, printed),) = asyncio.run(play_all(environments, [1], ["print(6 * 7)"]))
        assert (http, printed) == ("HttpService", "42\n")


def test_the_end_of_a_finite_set_is_a_reply(node):
    async def run(environments):
        return (await environments.reset("toy", 404)).reply

    with sidecar.connect_environments(envs("Moody"), node) as environments:
        reply = asyncio.run(run(environments))
    assert reply.observation == "" and reply.info == {"exhausted": True}


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("OnlyReset", "env.toy.target: session_toys:OnlyReset has no `step`"),
        ("Nowhere", "has no class Nowhere"),
        ("make", "env.toy.args={}"),
    ],
)
def test_what_cannot_be_built_is_a_users_mistake(node, target, line):
    for debug in (False, True):
        with pytest.raises(UserError) as error, sidecar.connect_environments(envs(target), node, debug=debug):
            pass
        assert line in str(error.value) and "\n" not in str(error.value)


def test_a_tag_that_is_not_set(node):
    async def run(environments):
        await environments.reset("other", 1)

    for debug in (False, True):
        with sidecar.connect_environments(envs("Counts"), node, debug=debug) as environments:
            with pytest.raises(SessionLost, match="no env.other is set"):
                asyncio.run(run(environments))


def test_resets_beyond_the_slots_wait_and_their_clock_does_not_run(node):
    settings = envs("Counts", args={"seconds": 0.2}, workers=1, envs_per_worker=2, reset_timeout=0.3, step_timeout=0.6)
    with sidecar.connect_environments(settings, node) as environments:
        assert asyncio.run(play_all(environments, range(6))) == expected(range(6))


# -- an environment's mistakes cost its episode alone -----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_each_episode_gets_an_honest_end(node, mode):
    cases = {
        "raise": "KeyError",
        "exit": "SystemExit: 3",
        "debug": "debug=true",
        "return None": "Moody.step: must return (observation, reward, terminated, truncated, info), not None",
        "return ('a', 1.0, True, {})": "not 4 values",
        "return (None, 1.0, True, False, {})": "observation must be a string, not NoneType",
        "return ('a', 'b', True, False, {})": "reward must be a number, not str",
        "return ('a', float('nan'), True, False, {})": "reward is nan",
        "return ('a', 1.0, 1, False, {})": "terminated must be True or False, not int",
        "return ('a', 1.0, True, None, {})": "truncated must be True or False, not NoneType",
        "return ('a', 1.0, True, False, None)": "info must be a dict, not NoneType",
        "return ('a', 1.0, True, False, {'x': {1}})": "info.x must be plain JSON, not set",
        "return ('a', 1.0, True, False, {'x': [1, {2: 3}]})": "info.x[1] has the key 2",
        "return ('a', 1.0, True, False, {'x': float('inf')})": "info.x is inf",
        "return ('a', 1.0, True, False, {'x': 1 << 80})": "more than 64 bits",
        "return ('a' * (3 << 20), 1.0, True, False, {})": "at most",
        "return ('\\ud800', 1.0, True, False, {})": "cannot be sent",
    }
    with sidecar.connect_environments(envs("Moody", mode=mode), node) as environments:

        async def run():
            return await asyncio.gather(*(play(environments, 1, [case]) for case in cases), play(environments, 2))

        *episodes, good = asyncio.run(run())
        assert good[1:] == ["fine"] * 3
        for episode, text in zip(episodes, cases.values(), strict=True):
            assert episode[-1].reason == "error" and text in episode[-1].detail and "\n" not in episode[-1].detail
        assert "session_toys.py" in episodes[0][-1].detail and "KeyError" in episodes[0][-1].traceback
        assert fetch_status(node.address, None).envs["toy"].deaths == 0


def test_numbers_of_numpy_are_numbers(node):
    action = "return ('a', __import__('numpy').float32(0.5), __import__('numpy').bool_(True), False, {'n': (1, 2)})"

    async def run(environments):
        session = await environments.reset("toy", 1)
        return await session.step(action)

    with sidecar.connect_environments(envs("Moody"), node) as environments:
        reply = asyncio.run(run(environments))
    assert (reply.reward, reply.terminated, reply.info) == (0.5, True, {"n": [1, 2]})


def test_a_lost_session_stays_lost(node):
    async def run(environments):
        session = await environments.reset("toy", 1)
        for action in ("raise", "a"):
            with pytest.raises(SessionLost, match="KeyError"):
                await session.step(action)
        await session.close()
        await session.close()
        return await play(environments, 1)

    with sidecar.connect_environments(envs("Moody"), node) as environments:
        assert asyncio.run(run(environments))[1:] == ["fine"] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["step", "reset", "episode"])
def test_deadlines(node, mode, how):
    args = {"mood": "sleep 60"} if how == "reset" else {}
    limits = {f"{how}_timeout": 0.4}
    actions = ["sleep 0.2", "sleep 60" if how == "step" else "sleep 2", "a"]
    with sidecar.connect_environments(envs("Moody", mode=mode, args=args, **limits), node) as environments:

        async def run():
            victim = play(environments, 13, actions)
            others = [play(environments, seed, ["a", "sleep 0.1", "a"]) for seed in range(3)]
            return await asyncio.gather(victim, *others)

        victim, *others = asyncio.run(run())
        assert victim[-1].reason == "timeout" and f"{how} took longer than 0.4 s" in victim[-1].detail
        assert reasons(others) == ["ok"] * 3  # in thread mode, of the same worker
        assert reasons(asyncio.run(play_all(environments, range(4), ["a"]))) == ["ok"] * 4


def test_a_thread_that_spins_costs_its_own_episode(node):
    with sidecar.connect_environments(envs("Moody", step_timeout=0.5), node) as environments:

        async def run():
            others = [play(environments, seed, ["sleep 0.2"] * 6) for seed in range(3)]
            return await asyncio.gather(play(environments, 1, ["spin 60"]), *others)

        worker = workers_of(environments)
        assert reasons(asyncio.run(run())) == ["timeout", "ok", "ok", "ok"]
        assert len(worker) == 1 and gone_within(worker, 5)


def test_a_worker_that_is_stuck_as_a_whole_is_ended(node):
    with sidecar.connect_environments(envs("Moody", step_timeout=1.0), node) as environments:

        async def run():
            idle = await environments.reset("toy", 2)
            episode = await play(environments, 1, ["stop"])
            await asyncio.sleep(3.0)
            with pytest.raises(SessionLost, match="hung"):
                await idle.step("a")
            return episode

        assert asyncio.run(run())[-1].reason == "timeout"
        assert reasons(asyncio.run(play_all(environments, range(4), ["a"]))) == ["ok"] * 4


@pytest.mark.parametrize(("mode", "ends"), [("process", ["ok"] * 3), ("thread", ["lost"] * 3)])
def test_a_worker_that_dies(node, mode, ends):
    with sidecar.connect_environments(envs("Moody", mode=mode), node) as environments:

        async def run():
            others = [play(environments, seed, ["sleep 0.4", "a"]) for seed in range(3)]
            return await asyncio.gather(play(environments, 13, ["sleep 0.2", "die"]), *others)

        victim, *others = asyncio.run(run())
        assert victim[-1].reason == "lost" and "died" in victim[-1].detail
        assert reasons(others) == ends
        assert reasons(asyncio.run(play_all(environments, range(4), ["a"]))) == ["ok"] * 4


def test_an_idle_session_hears_of_its_workers_death_with_its_next_step(node):
    with sidecar.connect_environments(envs("Moody"), node) as environments:

        async def run():
            session = await environments.reset("toy", 1)
            worker = psutil.Process(int(session.reply.observation.split()[0]))
            worker.kill()
            gone_within([worker], 2.0)
            with pytest.raises(SessionLost, match="died"):
                await session.step("a")
            await session.close()
            return await play(environments, 1)

        assert asyncio.run(run())[1:] == ["fine"] * 3


@pytest.mark.parametrize("mode", MODES)
def test_memory_has_a_cap(node, mode):
    with sidecar.connect_environments(envs("Moody", mode=mode, memory_mb=100), node) as environments:
        episodes = asyncio.run(play_all(environments, [1], ["hold 10", "hold 500", "a"]))
        assert episodes[0][1] == "fine" and "MemoryError" in episodes[0][-1].detail
        first = episodes[0][0].split()[0]
        again = asyncio.run(play(environments, 1, ["hold 60", "a"]))  # what the first worker holds is gone
        assert again[1:] == ["fine"] * 2 and again[0].split()[0] != first


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_is_recycled_and_closes_its_environments(node, mode, tmp_path):
    told = tmp_path / "closed"
    settings = envs("Moody", mode=mode, envs_per_worker=2, recycle_after=2, args={"mood": f"tell {told}"})
    with sidecar.connect_environments(settings, node) as environments:

        async def run():
            return [(await play(environments, seed))[0].split()[0] for seed in range(6)]

        pids = asyncio.run(run())
        assert len(set(pids)) == 3 if mode == "thread" else len(set(pids)) >= 2
        assert gone_within([psutil.Process(int(pid)) for pid in pids[:2] if psutil.pid_exists(int(pid))], 3.0)
        assert told.read_text().startswith("closed\n")
        assert fetch_status(node.address, None).envs["toy"].deaths == 0


def test_without_anything_to_do(node):
    with sidecar.connect_both(RewardsConfig(), EnvsConfig(), node) as (scorer, environments):
        assert (scorer.outstanding, environments.outstanding) == (0, 0)
    assert not Path(node.address.removeprefix("ipc://")).parent.exists()
