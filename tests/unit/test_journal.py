"""The journal's lines and exclusive times, and the hang report made of heartbeats."""

import json
import time
from pathlib import Path

import pytest

from spmd_rl.distributed import Journal, solo
from spmd_rl.distributed.journal import CollectiveCall
from spmd_rl.distributed.report import Heartbeat, Peer, RankState, hang_report


def lines(journal: Journal) -> list[dict]:
    return [json.loads(line) for line in journal.path.read_text().splitlines()]


def test_lines_are_there_on_entry_and_a_restart_appends(tmp_path: Path) -> None:
    for _ in range(2):
        journal = Journal(tmp_path, 3, size=4)
        journal.set_step(7)
        with journal.phase("update"), journal.collective("plan") as seq:
            assert seq == 1
            assert journal.inside == CollectiveCall("plan", 1)
            entered = lines(journal)
        assert (journal.inside, journal.last) == (None, CollectiveCall("plan", 1))
        journal.close()
    assert [line["event"] for line in entered[-4:]] == ["start", "step", "enter", "collective"]
    expected = {"event": "collective", "phase": "update", "name": "plan", "seq": 1, "step": 7}
    assert expected.items() <= entered[-1].items()
    everything = lines(journal)
    assert [line["event"] for line in everything[6:]] == [line["event"] for line in everything[:6]]
    assert everything[0]["rank"] == 3 and everything[0]["size"] == 4


def test_a_collective_that_raises_is_not_done(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    with pytest.raises(KeyError), journal.collective("plan"):
        raise KeyError
    assert [line["event"] for line in lines(journal)] == ["start", "collective"]
    assert journal.inside is None


def test_a_wait_counts_as_arrived_at_the_next_collective_and_leaves_no_trace(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    for _ in range(2):
        with journal.waiting("end of step"):
            assert journal.inside == CollectiveCall("end of step", 1)
        assert journal.inside is None
    with journal.collective("end of step"):
        assert journal.inside == CollectiveCall("end of step", 1)
    assert [line["event"] for line in lines(journal)] == ["start", "collective", "collective_done"]


def test_kinds_of_time_nest_and_idling_is_written_where_it_begins_and_ends(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    with journal.kind("copy"), journal.collective("meet"):
        pass
    for idle in (False, True, True, False, False):
        journal.idle(idle)
    told = [(line["event"], line.get("kind")) for line in lines(journal)[1:]]
    assert told == [
        ("kind", "copy"),
        ("collective", "wait"),
        ("collective_done", None),
        ("kind_done", None),
        ("kind", "wait"),
        ("kind_done", None),
    ]


def test_times_are_exclusive_and_taken_once() -> None:
    with solo() as world:
        with world.phase("generate"):
            time.sleep(0.05)
            with world.phase("score"):
                time.sleep(0.1)
            running = world.journal.take_times()
            time.sleep(0.02)
        assert set(running) == {"generate", "score"}
        assert 0.05 <= running["generate"] < 0.1 <= running["score"]
        rest = world.journal.take_times()
        assert set(rest) == {"generate"} and 0.02 <= rest["generate"] < 0.1
        assert world.journal.take_times() == {}


def test_interleaved_phases_are_our_mistake() -> None:
    with solo() as world:
        outer, inner = world.phase("a"), world.phase("b")
        outer.__enter__()
        inner.__enter__()
        with pytest.raises(AssertionError, match="interleaved"):
            outer.__exit__(None, None, None)
        with pytest.raises(AssertionError, match="interleaved"):
            inner.__exit__(None, None, None)


def test_what_moves_is_progress_and_a_phase_is_not() -> None:
    with solo() as world:
        counts = [world.journal.progress]
        world.progress(5)
        counts.append(world.journal.progress)
        with world.phase("score"), world.journal.kind("wait"):
            world.journal.idle(True)
            counts.append(world.journal.progress)
            world.barrier("b")
            counts.append(world.journal.progress)
    assert counts[1] == counts[2] == counts[0] + 5
    assert counts[3] > counts[2]


def test_a_rank_is_excused_while_it_is_slow_or_expects_something(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    with journal.extend_timeout(60):
        with journal.extend_timeout(0):
            assert journal.excused()
    assert not journal.excused()
    with journal.extend_timeout(0):
        assert not journal.excused()
    journal.expect(60)
    assert not journal.excused(), "it has other things to do"
    journal.idle(True)
    assert journal.excused()
    journal.expect(0)
    assert not journal.excused()


def test_an_event_costs_microseconds(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            with journal.phase("x"):
                pass
        best = min(best, (time.perf_counter() - began) / 200)
    assert best < 20e-6


def heartbeat(rank: int, phase: str, call: CollectiveCall | None, age: float = 0.1) -> Heartbeat:
    state = RankState(0.0, 4, phase, call, call or CollectiveCall("plan", 8))
    return Heartbeat(Peer(rank, "0", "host", 100 + rank, 0.0), state, age, age < 1.5)


def test_report_tells_apart_those_who_arrived() -> None:
    plan = CollectiveCall("plan", 9)
    heartbeats = [
        heartbeat(0, "prepare", plan),
        heartbeat(1, "prepare", plan),
        heartbeat(2, "update", CollectiveCall("norm", 9)),
        heartbeat(3, "prepare", plan, age=6.04),
        heartbeat(4, "generate", None),
        Heartbeat(Peer(5, "1", "other", 7, 0.0), None, 9.0, False),
    ]
    assert hang_report(heartbeats, 300.0, "here").splitlines() == [
        "spmd_rl: a stall: no progress on any of 6 ranks for 300 s (journal.stall_seconds)",
        "  step 4, phase: prepare",
        "  collective: 'plan' #9",
        "  arrived: ranks 0, 1",
        "  did not arrive: ranks 2, 3, 4, 5",
        "  stopped, dead or cut off: ranks 3, 5",
        "    rank 2 (pid 102 on host): in phase update, in collective 'norm' #9",
        "    rank 3 (pid 103 on host): no heartbeat for 6.0 s: stopped, dead or cut off; no stack. "
        "Last seen in phase prepare, in collective 'plan' #9",
        "    rank 4 (pid 104 on host): in phase generate, after collective 'plan' #8",
        "    rank 5 (pid 7 on other): no heartbeat ever: stopped, dead or cut off; no stack",
        "  stacks: here",
    ]


def test_a_chain_of_waits_is_followed_to_the_rank_that_is_dead() -> None:
    """Rank 0 waits for rank 1, in a group of the two, and rank 1 for rank 2, which is dead."""
    heartbeats = [
        heartbeat(0, "eval", CollectiveCall("train: eval: parts", 9, (0, 1))),
        heartbeat(1, "eval", CollectiveCall("eval: answers of generator ranks", 3)),
        heartbeat(2, "generate", None, age=4.0),
    ]
    lines = [line.strip() for line in hang_report(heartbeats, 3.0, "here").splitlines()]
    assert "collective: 'eval: answers of generator ranks' #3" in lines
    assert "arrived: rank 1" in lines and "stopped, dead or cut off: rank 2" in lines


def test_of_two_waits_for_a_dead_rank_the_one_is_told_that_nobody_else_holds_up() -> None:
    """Ranks 2 and 3 wait for rank 0 too, which waits for rank 1: the dead one."""
    heartbeats = [
        heartbeat(0, "update", CollectiveCall("train: update: backward", 9, (0, 1))),
        heartbeat(1, "update", None, age=4.0),
        heartbeat(2, "generate", CollectiveCall("generate: end of step", 3)),
        heartbeat(3, "generate", CollectiveCall("generate: end of step", 3)),
    ]
    lines = [line.strip() for line in hang_report(heartbeats, 3.0, "here").splitlines()]
    assert "collective: 'train: update: backward' #9" in lines
    assert "arrived: rank 0" in lines and "did not arrive: rank 1" in lines
    slow = [*heartbeats[:1], heartbeat(1, "update", None), *heartbeats[2:]]
    lines = [line.strip() for line in hang_report(slow, 3.0, "here").splitlines()]
    assert "collective: 'train: update: backward' #9" in lines, "and where nobody is dead, but one does something else"
    askers = [heartbeat(rank, "generate", CollectiveCall("generate: answer of rank 1", 3, (1,))) for rank in (2, 3)]
    lines = [line.strip() for line in hang_report([*heartbeats[:2], *askers], 3.0, "here").splitlines()]
    assert "collective: 'train: update: backward' #9" in lines, "a meeting rather than who asks it for something"
    lines = [line.strip() for line in hang_report([*heartbeats[1:2], *askers], 3.0, "here").splitlines()]
    assert "collective: 'generate: answer of rank 1' #3" in lines and "did not arrive: rank 1" in lines


def test_report_of_a_hang_outside_collectives_names_the_silent() -> None:
    report = hang_report([heartbeat(0, "generate", None), heartbeat(1, "generate", None, age=4.0)], 3.0, "here")
    assert "phase: generate" in report
    assert "collective: no rank is in one" in report
    assert "did not arrive: rank 1\n" in report
