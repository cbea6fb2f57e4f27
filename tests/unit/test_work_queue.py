"""The queue of generating ranks, over random histories of ranks that join, claim, stop, die, come back, speak late."""

import random
from collections import defaultdict

import msgspec
import pytest

from spmd_rl.config.schema import RolloutConfig
from spmd_rl.rollout.step_plan import Cursor, plan_step
from spmd_rl.rollout.table import SliceReport, build_table
from spmd_rl.split.messages import Stats
from spmd_rl.split.work_queue import MAX_SILENT, Limits, WorkQueue

LEASE = 5.0
LIMITS = Limits(LEASE, 100.0)


class History:
    """A run of a few steps, in which a random rank does the next thing, or time passes, or the trainers go on."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.settings = RolloutConfig(
            prompts_per_step=draw.randint(1, 4),
            answers_per_prompt=2,
            over_sample=draw.randint(0, 2) if (tail := draw.choice(["none", "none", "defer"])) == "none" else 1,
            answers_per_claim=draw.choice([None, 1]),
            min_answers=1,
            accept=draw.choice(["in_order", "first_finished"]) if tail == "none" else "in_order",
            tail=tail,
        )
        self.staleness, self.last = draw.randint(0, 2), draw.randint(2, 5)
        self.now, self.version = 0.0, 0
        self.queue = WorkQueue(self.settings, self.staleness, lambda: self.now, Limits(LEASE), first=7)
        self.queue.begin(0, 1, self.last, Cursor(), random.Random(seed).choice([None, lambda ticket: -ticket % 3]))
        self.ranks: list[dict] = []
        """Each has its number, the pieces it works on, the version it has loaded, and whether it is stopped."""
        self.accepted: dict[int, list] = defaultdict(list)
        self.num_refused = self.num_lost = 0

    def join(self) -> None:
        number = self.queue.join("rank", True)
        assert number not in [rank["number"] for rank in self.ranks]
        self.queue.beat(number, 0, True)
        self.ranks.append({"number": number, "held": [], "version": self.version, "stopped": False, "heard": self.now})

    def say(self, rank: dict) -> bool:
        """A sign of life; whether the rank still counts, which it does exactly as long as its lease."""
        known = self.queue.beat(rank["number"], 0, True)
        assert known == (self.now - rank["heard"] <= LEASE)
        if known:
            rank["heard"] = self.now
        else:
            self.num_lost += len(rank["held"])
        return known

    def claim(self, rank: dict) -> None:
        step = self.queue.horizon.step
        rank["version"] = self.version if self.draw.random() < 0.5 else rank["version"]
        given = self.queue.claim(rank["number"], "step", step, rank["version"], self.draw.randint(0, 3))
        assert given.known or not given.pieces
        if given.pieces:
            assert rank["version"] >= step - 1 - self.staleness, "a token would be too old"
        rank["held"] += [(step, piece.place) for piece in given.pieces]

    def report(self, rank: dict) -> None:
        step, (ticket, number) = rank["held"].pop(self.draw.randrange(len(rank["held"])))
        scored = ticket % 3 > 0 or self.draw.random() < 0.2
        answers = range(2) if self.settings.answers_per_claim is None else [number]
        rows = [(ticket, a, a, 0, float(scored), scored, False, False, 0, False, True, 1, 1, 2) for a in answers]
        content = msgspec.msgpack.encode(SliceReport(ticket, number, "toy", rows))
        if self.queue.report(rank["number"], "step", step, (ticket, number), content, Stats(0.0, 1.0)):
            assert (ticket, number) not in self.accepted[step], "a slice counts twice"
            self.accepted[step].append((ticket, number))
            rank["heard"] = self.now
        else:
            self.num_refused += 1

    def play(self) -> list[set[int]]:
        """Until the last step has ended; the tickets that each step used."""
        used, cursor = [], Cursor()
        for _ in range(20_000):
            if self.version < self.last and self.queue.ended("step", self.version + 1):
                step = self.version + 1
                end = self.queue.take("step", step)
                assert [piece.place for piece in end.accepted] == self.accepted[step]
                plan = plan_step(cursor, self.settings)
                finished = [report for theirs in end.reports for report in theirs.finished]
                tickets = {report.ticket for report in finished}
                cursor_then = self.queue.horizon.cursor if self.queue.horizon.step == step + 1 else None
                mine = self.used(plan, end.reports)
                build_table(finished, mine, plan.slices)  # whole, and none twice
                assert mine <= tickets
                cursor = cursor.after(mine)
                assert cursor_then in (None, cursor)
                used.append(mine)
                self.version = step
            if len(used) == self.last:
                return used
            self.move()
        raise AssertionError("the run does not come to its end")

    def used(self, plan, reports) -> set[int]:
        if plan.accept == "first_finished":
            return {plan.cursor.ticket(position) for position in reports[0].used_here}
        return {plan.cursor.ticket(position) for position in range(int(reports[0].end))}

    def move(self) -> None:
        draw = self.draw
        self.now += draw.choice([0.0, 0.1, 1.0])
        running = [rank for rank in self.ranks if not rank["stopped"]]
        if len(running) < 1 or (len(self.ranks) < 4 and draw.random() < 0.05):
            return self.join()
        rank = draw.choice(self.ranks)
        what = draw.random()
        if rank["stopped"]:
            if what < 0.1:
                rank["stopped"] = False  # and goes on as if nothing had happened
            return None
        if rank["held"] and what < 0.45:
            return self.report(rank)  # even of what it has no lease for any more
        if what < 0.6 and not self.say(rank) or what > 0.98:
            if what > 0.99:
                self.queue.leave(rank["number"])
            return self.ranks.remove(rank)  # it ends by itself, or dies
        if what < 0.9:
            if self.say(rank):
                self.claim(rank)
            else:
                self.ranks.remove(rank)
        elif what > 0.95:
            rank["stopped"] = True
        return None


@pytest.mark.parametrize("part", range(4))
def test_no_ticket_is_lost_or_used_twice(part: int) -> None:
    refused = lost = 0
    for seed in range(100 * part, 100 * part + 100):
        history = History(seed)
        seen: set[int] = set()
        for step, used in enumerate(history.play(), 1):
            assert not used & seen, f"a ticket is used twice, seed {seed} step {step}"
            seen |= used
        if history.settings.accept == "in_order" and history.settings.tail == "none":
            assert seen == set(range(len(seen))), f"a ticket is lost, seed {seed}"
        refused, lost = refused + history.num_refused, lost + history.num_lost
    assert refused > 20 and lost > 20, "ranks are given up with work in hand, and speak late"


def places(given) -> list[tuple[int, ...]]:
    return [piece.place for piece in given.pieces]


def queue(**settings) -> tuple[WorkQueue, list[float]]:
    now = [0.0]
    made = WorkQueue(RolloutConfig(prompts_per_step=4, answers_per_prompt=2, **settings), 1, lambda: now[0], LIMITS)
    made.begin(0, 1, 3, Cursor())
    return made, now


def members(made: WorkQueue, count: int) -> list[int]:
    """Members whose engines are built."""
    found = [made.join("rank", True) for _ in range(count)]
    assert all(made.beat(member, 0, True) for member in found)
    return found


def test_what_a_silent_rank_claimed_is_done_by_another() -> None:
    made, now = queue()
    first, second = members(made, 2)
    mine = places(made.claim(first, "step", 1, 0, 9))
    assert mine == [(0, 0), (1, 0)], "no more than its share"
    theirs = places(made.claim(second, "step", 1, 0, 9))
    now[0] = LEASE - 1
    assert made.beat(second, 1, True)
    now[0] = LEASE + 1
    assert not made.claim(first, "step", 1, 0, 9).known
    assert not made.report(first, "step", 1, (0, 0), b"", Stats())
    assert places(made.claim(second, "step", 1, 0, 9)) == mine and theirs == [(2, 0), (3, 0)]


def test_a_version_that_is_too_old_gets_nothing() -> None:
    made, _ = queue()
    made.begin(0, 3, 3, Cursor())
    member = made.join("rank", True)
    assert made.claim(member, "step", 3, 1, 9) == (True, False, [], []), "its engine is not built"
    made.beat(member, 0, True)
    assert made.claim(member, "step", 3, 0, 9) == (True, False, [], [])
    assert made.claim(member, "step", 3, 1, 9).pieces


def test_a_probe_waits_for_those_who_were_there_and_live() -> None:
    made, now = queue()
    first, second, _ = members(made, 3)
    made.ask_probe(0)
    late = made.join("late", True)
    assert made.report(first, "probe", 0, (), b"", Stats()) and not made.ended("probe", 0)
    made.leave(second)
    now[0] = LEASE - 1
    made.beat(first, 0, True), made.beat(late, 0, True)
    assert not made.ended("probe", 0)
    now[0] = LEASE + 1
    assert made.ended("probe", 0)
    assert [piece.member for piece in made.take("probe", 0).accepted] == [first]


def test_a_probe_that_nobody_who_was_there_answers_is_answered_by_who_comes_later() -> None:
    made, _ = queue()
    first, late = made.join("rank", True), made.join("late", True)
    made.beat(first, 0, True)
    made.ask_probe(0)
    assert made.report(late, "probe", 0, (), b"", Stats()) and not made.ended("probe", 0)
    made.leave(first)
    assert made.ended("probe", 0)
    assert [piece.member for piece in made.take("probe", 0).accepted] == [late]


def test_held_out_prompts_are_answered_once() -> None:
    made, _ = queue()
    made.ask_eval(2, 3)
    first, second = members(made, 2)
    assert places(made.claim(first, "eval", 2, 1, 2)) == [], "it has another version"
    assert places(made.claim(first, "eval", 2, 2, 9)) == [(0,), (1,)] and made.offers_eval(2), "no more than its share"
    made.leave(first)
    assert places(made.claim(second, "eval", 2, 2, 9)) == [(0,), (1,), (2,)] and not made.offers_eval(2)
    assert all(made.report(second, "eval", 2, (index,), b"", Stats()) for index in range(3))
    assert made.ended("eval", 2) and not made.report(second, "eval", 2, (0,), b"", Stats())


def report(ticket: int) -> bytes:
    rows = [(ticket, a, a, 0, 1.0, True, False, False, 0, False, True, 1, 1, 2) for a in range(2)]
    return msgspec.msgpack.encode(SliceReport(ticket, 0, "toy", rows))


def test_static_claims_are_dealt_in_waves_by_the_order_of_members() -> None:
    made, _ = queue(claim="static")
    for number in range(3):
        made.enroll(number, f"rank {number}", leads=number != 1)
    dealt = {number: places(made.claim(number, "step", 1, 0, 1)) for number in (2, 1, 0)}
    assert dealt == {0: [(0, 0), (2, 0)], 1: [], 2: [(1, 0), (3, 0)]}
    assert not made.claim(0, "step", 1, 0, 9).pieces, "each once"


def test_what_is_carried_goes_on_and_what_is_done_early_counts_later() -> None:
    made, _ = queue(partial_rollout=True, over_sample=4)
    made.enroll(0, "rank 0", True)
    made.enroll(1, "rank 1", True)
    mine, theirs = (places(made.claim(member, "step", 1, 0, 4)) for member in (0, 1))
    assert (mine, theirs) == ([(0, 0), (1, 0), (2, 0), (3, 0)], [(4, 0), (5, 0), (6, 0), (7, 0)])
    for ticket in (4, 5):  # ahead of the step that will use them
        assert made.report(1, "step", 1, (ticket, 0), report(ticket), Stats(0.0, 1.0))
    for ticket in range(4):
        assert not made.ended("step", 1)
        assert made.report(0, "step", 1, (ticket, 0), report(ticket), Stats(0.0, 1.0))
    assert made.ended("step", 1) and made.horizon.step == 2
    end = made.take("step", 1)
    assert [one.running for one in end.reports] == [[(6, 0), (7, 0)], []] and len(end.accepted) == 4
    assert not made.give_back(0, "step", 1, (6, 0), begun=True), "it is another's"
    assert made.give_back(1, "step", 1, (6, 0), begun=True)
    given = made.claim(0, "step", 2, 1, 1)
    assert places(given) == [(6, 0)] and given.begun_by == [1]
    assert not made.report(1, "step", 1, (6, 0), report(6), Stats()), "it has given it back"
    assert made.report(1, "step", 1, (7, 0), report(7), Stats(0.0, 1.0))
    assert made.report(0, "step", 2, (6, 0), report(6), Stats(0.0, 1.0)) and made.ended("step", 2)
    end = made.take("step", 2)
    rows = {one.ticket: one.answers[0] for theirs in end.reports for one in theirs.finished}
    assert [(ticket, rows[ticket][8]) for ticket in sorted(rows)] == [(4, 1), (5, 1), (6, 0), (7, 1)], "lags"
    assert {(piece.place[0], piece.number) for piece in end.accepted} == {(4, 1), (5, 1), (6, 2), (7, 1)}


def test_a_piece_that_is_never_done_is_free_again_however_often_its_member_beats() -> None:
    made, now = queue()
    slow, other = members(made, 2)
    mine = places(made.claim(slow, "step", 1, 0, 9))
    for now[0] in range(0, 110, 4):
        assert made.beat(slow, int(now[0]), True) and made.beat(other, 0, True)
    assert places(made.claim(other, "step", 1, 0, 9))[:2] == mine, "all of it: who failed has no share"
    assert not made.report(slow, "step", 1, mine[0], report(0), Stats())


@pytest.mark.parametrize("how", ["too long", "leaves", "gives back"])
def test_nobody_takes_a_piece_again_and_again_and_keeps_it_from_others(how: str) -> None:
    """Nor does who comes back under another number, in the moment in which it is free."""
    made, now = queue()
    greedy, other = members(made, 2)
    wanted = places(made.claim(greedy, "step", 1, 0, 9))
    theirs = places(made.claim(other, "step", 1, 0, 9))
    while theirs:
        assert made.report(other, "step", 1, theirs[0], report(theirs.pop(0)[0]), Stats(0.0, 1.0))
    for now[0] in range(0, 101, 4):
        assert made.beat(greedy, 0, True) and made.beat(other, 0, True)
    assert not places(made.claim(other, "step", 1, 0, 9)), "it asks in vain"
    match how:
        case "too long":
            now[0] = 100.5
        case "leaves":
            made.leave(greedy)
            (greedy,) = members(made, 1)
        case "gives back":
            assert all(made.give_back(greedy, "step", 1, place, False) for place in wanted)
    assert not places(made.claim(greedy, "step", 1, 0, 9)), "others wait for it"
    assert places(made.claim(other, "step", 1, 0, 9)) == wanted


def test_who_has_done_nothing_has_one_piece_at_a_time_where_others_have() -> None:
    made, _ = queue(over_sample=4)
    first, second = members(made, 2)
    (mine,) = places(made.claim(first, "step", 1, 0, 1))
    assert made.report(first, "step", 1, mine, report(mine[0]), Stats(0.0, 1.0))
    assert len(places(made.claim(second, "step", 1, 0, 9))) == 1 and not places(made.claim(second, "step", 1, 0, 9))
    assert len(places(made.claim(first, "step", 1, 0, 9))) == 4


def test_who_joins_and_says_nothing_makes_room_for_others() -> None:
    made, _ = queue()
    honest = made.join("honest", True)
    made.beat(honest, 0, True)
    silent = [made.join("silent", True) for _ in range(3 * MAX_SILENT)]
    assert len(made.members) == 1 + MAX_SILENT and honest in made.members
    assert list(made.members)[1:] == silent[-MAX_SILENT:]
    again = [made.join("again", True, b"one connection") for _ in range(9)]
    assert list(made.members)[-1:] == again[-1:] and not set(again[:-1]) & set(made.members)
