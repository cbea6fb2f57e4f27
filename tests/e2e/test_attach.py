"""Generators of their own: jobs that attach to a training job, die, come back, join late, and cost it no ticket."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from launch import sidecar_keys
from tests.e2e.runs import EXACT, LINGERING, Running, Toy
from tests.e2e.test_agents import AgentToy
from tests.patience import patient

LEASE = min(patient(2.0), 8.0)
SETTINGS = (
    *("policy.dtype=float32", "placement.mode=split", "placement.generate=attached", "placement.max_staleness=0"),
    *(f"placement.lease_seconds={LEASE}", "eval.every=1"),
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def straight(toy: Toy) -> Running:
    """Three steps on one rank that does everything: the reference."""
    return toy.run(*EXACT, "steps=3", "eval.every=1", ranks=1, name="straight")


class Crews:
    """Jobs that attach to one training job."""

    def __init__(self, toy: Toy, run: Running, *settings: str) -> None:
        self.toy, self.run, self.settings, self.all = toy, run, settings, []

    def start(self, *settings: str, ranks: int = 1, linger: str = "") -> Running:
        known = set(self.run.run_dir.glob("attached/*"))
        env = {"LINGER": linger, "LINGER_SECONDS": str(patient(0.7))}
        how = {"script": LINGERING, "env": env} if linger else {}
        same = (*self.settings, f"run.dir={self.run.run_dir}", "placement.attach=auto")
        crew = self.toy.start(*same, *settings, ranks=ranks, name=f"{self.run.run_dir.name}-crew{len(self.all)}", **how)
        self.all.append(crew)
        deadline = time.time() + patient(60)
        while not (found := set(self.run.run_dir.glob("attached/*/journal")) - {path / "journal" for path in known}):
            assert time.time() < deadline and crew.process.poll() is None, crew.text()[-3000:]
            time.sleep(0.02)
        crew.run_dir = found.pop().parent
        return crew

    def slices(self) -> list[int]:
        """What each of them has handed in."""
        events = [[e for rank in range(2) for e in crew.events(rank)] for crew in self.all]
        return [sum(e["slices"] for e in theirs if e["event"] == "handed in") for theirs in events]


@pytest.fixture
def training(toy: Toy):
    """Start a training job; whatever of it and its attached jobs is left at the end is killed."""
    made: list[Crews] = []

    def start(name: str, *settings: str, ranks: int = 1) -> Crews:
        both = (*SETTINGS, *settings)
        made.append(Crews(toy, toy.start(*both, ranks=ranks, name=name), *both))
        return made[-1]

    yield start
    for crews in made:
        for job in (crews.run, *crews.all):
            for process in job.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def wait_for_step(run: Running, step: int) -> None:
    deadline = time.time() + patient(60)
    while (
        not run.run_dir.joinpath("metrics.jsonl").exists()
        or run.metrics()[-1:][0:1] == []
        or (run.metrics()[-1]["step"] < step)
    ):
        assert time.time() < deadline and run.process.poll() is None, run.text()[-3000:]
        time.sleep(0.02)


def tokens(run: Running, step: int) -> list:
    return [(s["ticket"], s["answer"], [turn["token_ids"] for turn in s["turns"]]) for s in run.samples(step)]


def assert_bounded(run: Running, steps: int, staleness: int) -> None:
    """Each ticket once and in order, and no token too old."""
    assert [line["step"] for line in run.metrics()] == list(range(steps + 1))
    used = [(s["ticket"], s["answer"]) for step in range(1, steps + 1) for s in run.samples(step)]
    assert used == [(ticket, answer) for ticket in range(max(used)[0] + 1) for answer in range(4)]
    for step in range(1, steps + 1):
        turns = [turn for s in run.samples(step) for turn in s["turns"]]
        assert {step - 1 - version for turn in turns for version in turn["versions"]} <= set(range(staleness + 1))


def assert_whole(run: Running, straight: Running, steps: int, staleness: int = 0) -> None:
    """As that, and where both are on-policy, the samples of the reference."""
    assert_bounded(run, steps, staleness)
    for step in (1,) if staleness else (1, 2):
        assert tokens(run, step) == tokens(straight, step)
    assert all("val/score/mean" in line for line in run.metrics())


def test_one_attached_rank_makes_what_a_rank_of_the_job_makes(training, straight: Running) -> None:
    jobs = training("one", "steps=3")
    crew = jobs.start()
    assert jobs.run.wait(60) == 0, jobs.run.text()[-3000:]
    assert crew.wait(30) == 0, crew.text()[-3000:]
    assert_whole(jobs.run, straight, 3)
    scores = "critic/score/mean", "val/score/mean"
    assert [[line.get(key) for key in scores] for line in jobs.run.metrics()] == [
        [line.get(key) for key in scores] for line in straight.metrics()
    ]
    assert not (jobs.run.run_dir / "attach.json").exists()


POINTS = ["progress generate", "enter publish", "enter eval"]


@pytest.mark.parametrize("point", [POINTS[0], *(pytest.param(point, marks=pytest.mark.slow) for point in POINTS[1:])])
def test_a_killed_job_costs_what_it_was_about(training, straight: Running, point: str) -> None:
    jobs = training(f"killed-{point.replace(' ', '-')}", "steps=3")
    victim = jobs.start(linger=point)
    victim.wait_for(point)
    os.kill(victim.pid("rank-0"), signal.SIGKILL)
    jobs.start()
    assert jobs.run.wait(60) == 0, jobs.run.text()[-3000:]
    assert_whole(jobs.run, straight, 3)
    assert f"is given up: silent for more than {LEASE:g} s" in jobs.run.text()


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_stopped_rank_that_goes_on_finds_itself_given_up(training, straight: Running, point: str) -> None:
    jobs = training(f"stopped-{point.replace(' ', '-')}", "steps=40")
    victim = jobs.start(linger=point)
    victim.wait_for(point)
    os.kill(victim.pid("rank-0"), signal.SIGSTOP)
    jobs.start()
    wait_for_step(jobs.run, 3)
    os.kill(victim.pid("rank-0"), signal.SIGCONT)
    assert victim.wait(60) == 1
    assert "error: the training job has given this rank up" in victim.text()
    assert jobs.run.wait(120) == 0, jobs.run.text()[-3000:]
    assert_whole(jobs.run, straight, 40)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_several_jobs_share_the_tickets_and_late_ones_join(training, straight: Running, staleness: int) -> None:
    """Two training ranks; training begins with the third attached rank, and loses the first job later."""
    grown = ("placement.min_generate=3", "publish.delta=true", "steps=30", f"placement.max_staleness={staleness}")
    jobs = training(f"shared-{staleness}", *grown, ranks=2)
    first = jobs.start()
    time.sleep(3.0)
    assert "waiting for the same command with placement.attach=auto" in jobs.run.text()
    assert not any(event.get("phase") == "publish" for event in jobs.run.events(0)), "training waits for more"
    jobs.start(ranks=2)
    wait_for_step(jobs.run, 4)
    os.kill(first.pid("rank-0"), signal.SIGKILL)
    late = jobs.start()
    assert jobs.run.wait(120) == 0, jobs.run.text()[-3000:]
    assert [crew.wait(30) for crew in jobs.all[1:]] == [0, 0]
    assert_whole(jobs.run, straight, 30, staleness)
    assert max(line["placement/attached"] for line in jobs.run.metrics()[1:]) >= 2
    assert all(jobs.slices()), f"each of them has done something: {jobs.slices()}"
    fetched = [event for event in late.events(0) if event["event"] == "fetched"]
    assert fetched[0]["version"] >= 4 and fetched[0]["bytes"] == fetched[0]["whole"], "a late one begins with all of it"


@pytest.mark.slow
def test_training_that_nobody_attaches_to_says_what_it_waits_for_and_resumes(training, straight: Running) -> None:
    limits = ("steps=3", "placement.absent_seconds=3", "journal.stall_seconds=4", "reward.toy.timeout=2")
    jobs = training("absent", *limits)
    victim = jobs.start(linger=POINTS[0])
    victim.wait_for(POINTS[0])
    os.kill(victim.pid("rank-0"), signal.SIGKILL)
    assert jobs.run.wait(60) == 1
    report = Path(jobs.run.run_dir, "hang.txt").read_text()
    assert "generate: step 2 of attached jobs" in report
    again = training("absent", "steps=3", "reward.toy.timeout=2")
    again.start()
    assert again.run.wait(60) == 0, again.run.text()[-3000:]
    assert_whole(again.run, straight, 3)


@pytest.mark.slow
def test_with_keys_over_tcp_and_only_with_the_same_settings(training, straight: Running, tmp_path: Path) -> None:
    keys = sidecar_keys.make(tmp_path / "keys")
    jobs = training("keys", "steps=3", "placement.bind=tcp://*", f"sidecar.keys={keys}", ranks=2)
    other = jobs.start("policy.lr=2e-3", "algorithm.clip_high=0.5")
    assert other.wait(60) == 2
    assert "error: placement.attach: " in other.text() and "policy.lr: 0.002 here, 0.001 in the" in other.text()
    jobs.start(ranks=2)
    assert jobs.run.wait(60) == 0, jobs.run.text()[-3000:]
    assert_whole(jobs.run, straight, 3)


@pytest.mark.slow
def test_agents_play_on_attached_ranks(tmp_path: Path) -> None:
    toy = AgentToy(tmp_path, max_position_embeddings=2048)
    settings = ("steps=3", "rollout.claim=store", *SETTINGS[1:])
    run = toy.start(*settings, ranks=1, name="agents")
    crew = toy.start(*settings, f"run.dir={run.run_dir}", "placement.attach=auto", ranks=2, name="agents-crew")
    assert run.wait(90) == 0, run.text()[-3000:]
    assert crew.wait(30) == 0, crew.text()[-3000:]
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3]
    used = [s["ticket"] for step in (2, 3) for s in run.samples(step)]  # demonstrations come first
    assert set(used) == set(range(max(used) + 1)) and used == sorted(used)
    assert [line.get("placement/attached", 0) > 0 for line in run.metrics()] == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("swap", ["recompute", "keep"])
def test_attached_ranks_take_a_new_policy_in_the_middle_of_their_answers(training, swap: str) -> None:
    longer = ("rollout.max_new_tokens=60", "engine.max_running=4")  # a step of answers outlasts an update
    jobs = training(f"swap-{swap}", "steps=6", "placement.max_staleness=2", *longer)
    crews = [jobs.start(f"placement.swap={swap}"), jobs.start(f"placement.swap={swap}", ranks=2)]
    assert jobs.run.wait(90) == 0, jobs.run.text()[-3000:]
    assert [crew.wait(30) for crew in crews] == [0, 0], [crew.text()[-2000:] for crew in crews]
    assert_bounded(jobs.run, 6, 2)
    turns = [turn for step in range(1, 7) for s in jobs.run.samples(step) for turn in s["turns"]]
    assert all(turn["versions"] == sorted(turn["versions"]) for turn in turns)
    assert any(len(set(turn["versions"])) > 1 for turn in turns), "no answer went on with a newer policy"
