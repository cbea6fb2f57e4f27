"""The simulator: its engine against a token-by-token one, its store against torch's, and what its runs must keep."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from bench.virtual.simulate import __main__ as simulate
from bench.virtual.simulate.cluster import Cluster
from bench.virtual.simulate.engine import Speed, VirtualEngine
from bench.virtual.simulate.lengths import Lengths, long_tail, recorded
from bench.virtual.simulate.policies import POLICIES, play
from bench.virtual.simulate.scene import Scene
from bench.virtual.simulate.store import CountingStore
from bench.virtual.tail import draw
from spmd_rl.base.errors import UserError
from spmd_rl.rollout import coordinator


def default_scene(replicas: int, **options) -> Scene:
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return simulate.scene(simulate.parser().parse_args(words), replicas)


def slow_engine(arrivals: list[tuple[int, int]], speed: Speed, max_running: int) -> dict[int, float]:
    """Request -> when it ends: one step after the other. A request (step, tokens) is there from that step on."""
    now, left, queue, ended, step = 0.0, {}, list(enumerate(arrivals)), {}, 0
    while queue or left:
        while queue and queue[0][1][0] <= step and len(left) < max_running:
            number, (_, tokens) = queue.pop(0)
            left[number] = tokens
        now += speed.step(len(left)) if left else 1.0
        left = {number: tokens - 1 for number, tokens in left.items()}
        ended |= {number: now for number, tokens in left.items() if tokens == 0}
        left = {number: tokens for number, tokens in left.items() if tokens}
        step += 1
    return ended


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 6))
def test_an_engine_takes_as_long_as_one_that_computes_each_token(lengths: list[int], max_running: int) -> None:
    speed = Speed(1.0, 0.25)
    engine, ended = VirtualEngine(speed, max_running), {}
    for number, tokens in enumerate(lengths):
        engine.add(number, tokens)
    while engine.num_requests:
        now = engine.next_end()
        ended |= dict.fromkeys(engine.advance(now), now)
    assert ended == pytest.approx(slow_engine([(0, tokens) for tokens in lengths], speed, max_running))
    assert engine.tokens == pytest.approx(sum(lengths)) and engine.busy == pytest.approx(max(ended.values()))


def test_what_an_engine_had_begun_it_goes_on_with() -> None:
    engine = VirtualEngine(Speed(1.0, 0.0), 1)
    engine.add("a", 5)
    engine.add("b", 7)
    engine.advance(2.0)
    assert engine.stop() == {"a": 3.0, "b": 7} and engine.num_requests == 0
    engine.advance(100.0)
    engine.add("a", 3.0)
    assert engine.next_end() == 103.0 and engine.busy == 2.0


operations = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(["n", "m"]), st.integers(0, 3)),
    st.tuples(st.just("set"), st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"])),
    st.tuples(st.just("check"), st.lists(st.sampled_from(["a", "b", "n"]), min_size=1)),
    st.tuples(st.just("delete_key"), st.sampled_from(["a", "n"])),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(operations, max_size=20))
def test_the_store_answers_as_a_real_one(asked: list[tuple]) -> None:
    ours, theirs = CountingStore(), HashStore()
    for name, *args in asked:
        assert getattr(ours, name)(*args) == getattr(theirs, name)(*args) or name == "set"
    for key in ("a", "b", "n", "m"):
        if theirs.check([key]):
            assert ours.get(key) == theirs.get(key)


def test_lengths_are_a_pure_function_and_alike_within_a_ticket() -> None:
    law = long_tail(100, 1.0, 1000)
    one, other = Lengths(law, 1), Lengths(law, 1)
    assert one.of(7, 4) == other.of(7, 4) != Lengths(law, 2).of(7, 4)
    assert one.of(7, 8)[:4] == one.of(7, 4)
    assert all(len(set(Lengths(law, 0, 1.0).of(ticket, 8))) == 1 for ticket in range(9))
    drawn = [n for ticket in range(4000) for n in one.of(ticket, 4)]
    assert fmean(drawn) == pytest.approx(one.mean(), rel=0.05)
    assert max(drawn) == 1000 and sorted(drawn)[len(drawn) // 2] == pytest.approx(100, rel=0.05)


def test_lengths_of_a_file(tmp_path: Path) -> None:
    plain, samples = tmp_path / "lengths.txt", tmp_path / "step-000001.jsonl"
    plain.write_text("5\n1\n3\n3\n")
    rows = [{"turns": [{"token_ids": [1] * n}, {"token_ids": [2]}]} for n in (4, 0, 2, 2)]
    samples.write_text("\n".join(map(json.dumps, rows)))
    for path in (plain, samples):
        law = recorded(path)
        assert [law(z) for z in (-9, -0.1, 0.1, 9)] == [1, 3, 3, 5]
    plain.write_text("5\nfive\n")
    with pytest.raises(UserError, match=r"lengths.txt:2: neither a number of tokens nor a sample of a run"):
        recorded(plain)


@pytest.mark.parametrize("policy", [*POLICIES, "defer, slices", "partial in order"])
@pytest.mark.parametrize("qualify", [1.0, 0.6])
def test_every_ticket_is_used_once_and_none_is_lost(policy: str, qualify: float, monkeypatch) -> None:
    monkeypatch.setitem(POLICIES, "defer, slices", {"tail": "defer", "answers_per_claim": 3})
    monkeypatch.setitem(POLICIES, "partial in order", {"partial_rollout": True})
    scene = default_scene(5, qualify=qualify, seed=3)
    scene = replace(scene, settings=replace(scene.settings, **POLICIES[policy]))
    cluster, used = Cluster(scene), []
    for number, step in enumerate(cluster.steps()):
        used += step.used
        assert len(step.trained) == scene.settings.prompts_per_step
        assert set(used) | set(cluster.cursor.skipped) == set(range(cluster.cursor.next)), "a ticket is lost"
        if number == 20:
            break
    assert len(used) == len(set(used)), "a ticket is used twice"
    assert policy not in ("static batch", "store") or used == sorted(used)
    assert "first finished" in policy or "defer" in policy or not cluster.cursor.skipped
    if "defer" in policy:
        assert len(cluster.cursor.skipped) < 2 * scene.settings.prompts_per_step
    assert len(cluster.store) == 0 if policy == "static batch" else len(cluster.store) < 99, "keys of old steps"


def test_only_what_is_carried_is_stale() -> None:
    scene = default_scene(8)
    for policy in POLICIES:
        result = play(policy, scene, 8)
        assert (result.stale > 0) == ("partial" in policy)
        assert result.wasted == pytest.approx(0) or POLICIES[policy].get("over_sample") != 0


@pytest.mark.parametrize("policy", ["store", "store, slices", "first finished, partial", "defer"])
def test_store_operations_per_answer_do_not_grow_with_replicas(policy: str) -> None:
    few, many = (play(policy, default_scene(replicas), 6) for replicas in (8, 128))
    assert many.operations <= few.operations and few.operations < 6
    assert many.looks < few.looks, "looks are shared out"


def test_lengths_used_are_the_laws_own_unless_the_first_to_arrive_are_taken() -> None:
    def bias(policy: str, num_steps: int) -> float:
        scene = default_scene(16, seed=1)
        result = play(policy, scene, num_steps)
        last = max(ticket for step in result.steps for ticket in step.used)
        return result.mean_tokens / fmean(n for ticket in range(last + 1) for n in scene.lengths.of(ticket, 8))

    assert bias("store", 12) == pytest.approx(1.0)
    assert bias("first finished", 4) < 0.92
    assert bias("defer", 12) == pytest.approx(1.0, abs=0.02), "but for what waits at the end"
    assert bias("defer", 60) == pytest.approx(1.0, abs=0.005)


def test_replicas_find_the_end_at_their_paced_looks(monkeypatch) -> None:
    def seconds(looks_per_second: int) -> list[float]:
        monkeypatch.setattr(coordinator, "POLLS_PER_SECOND", looks_per_second)
        return [step.seconds for step in play("store", default_scene(64), 8).steps]

    pause, late = 63 / 10, [slow - fast for slow, fast in zip(seconds(10), seconds(10**6), strict=True)]
    assert all(0.5 * pause < x < 1.1 * pause for x in late), (
        "of 64 replicas some see it only just before a pause is over"
    )


def test_deferring_is_twice_as_fast_as_static_batches_with_fresh_answers_only() -> None:
    scene = default_scene(256)
    static, defer = (play(policy, scene, 10) for policy in ("static batch", "defer"))
    assert defer.stale == static.stale == 0
    assert {len(step.trained) for step in static.steps + defer.steps} == {scene.settings.prompts_per_step}
    assert static.generate_seconds > 2 * defer.generate_seconds
    assert defer.bubble < static.bubble / 2


def test_the_front_prints_and_its_results_can_be_drawn(tmp_path: Path, capsys) -> None:
    results = simulate.main(["--replicas", "2", "4", "--steps", "3"])
    assert [(r.replicas, r.policy) for r in results] == [(n, policy) for n in (2, 4) for policy in POLICIES]
    told = capsys.readouterr().out
    assert "4 replicas" in told and "first finished, partial" in told and "no race is lost" in told
    draw(tmp_path / "tail.svg", results)
    text = (tmp_path / "tail.svg").read_text()
    assert "seconds of each step, 4 replicas" in text and text.count('id="patch_') > 12
    again = simulate.main(["--replicas", "4", "--steps", "3", "--policies", "defer"])
    assert again[0] == next(r for r in results if (r.replicas, r.policy) == (4, "defer"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--correlation", "2"], "--correlation: must lie between 0 and 1, not 2"),
        (["--qualify", "0"], "--qualify: must lie between 0, at which no group trains, and 1, not 0"),
        (["--lengths", "/nowhere"], "No such file"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], line: str) -> None:
    command = [sys.executable, "-m", "spmd_rl", "simulate", *words]
    if line == "No such file":
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    else:
        with pytest.raises(UserError, match=line):
            simulate.main(words)
