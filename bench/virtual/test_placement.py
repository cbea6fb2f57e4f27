"""The simulator of split placement: its clock, what must hold between its runs, its front."""

import math
from math import inf
from pathlib import Path

import pytest

from bench.virtual import placement
from bench.virtual.carried import Carried, carried_scene
from bench.virtual.clock import Clock
from bench.virtual.comparison import Comparison, Outcome
from bench.virtual.simulate import __main__ as simulate
from bench.virtual.two_sides import Colocated, Costs, Generation, Split, generation_on
from spmd_rl.base.errors import UserError


def comparison(replicas: int, policy: str, steps: int = 10, *words: str) -> Comparison:
    return Comparison(simulate.scene(placement.parser().parse_args(words), replicas), policy, steps)


def test_processes_wait_for_time_and_for_each_other() -> None:
    clock, said, told = Clock(5.0), [], []

    def first():
        yield 2.0
        told.append(clock.now)
        yield 1.0
        said.append(("first", clock.now))

    def second():
        yield lambda: bool(told)
        said.append(("second", clock.now))

    assert clock.play([first(), second()]) and clock.now == 8.0
    assert said == [("second", 7.0), ("first", 8.0)]
    with pytest.raises(AssertionError, match="wait for each other"):
        clock.play([iter([lambda: False])])
    assert not clock.play([iter([100.0])], until=9.0) and clock.now == 9.0


def test_a_colocated_run_takes_the_sum_and_a_split_one_the_longer_side() -> None:
    runs = comparison(8, "store")
    costs = Costs(train=30.0)
    generation = Generation(runs.scene)
    together = Colocated(generation, costs, 8).steps(6)
    assert together[-1].at == pytest.approx(sum(step.generated.seconds + 30 for step in together))
    apart = Split(generation, costs, 16, max_staleness=1).steps(6)  # 8 of 16 ranks train: 60 s
    for before, step, later in zip(apart, apart[1:], apart[2:], strict=False):  # which is generated meanwhile
        assert step.at - before.at == pytest.approx(max(later.generated.seconds, 60.0))
    strictly = Split(generation, costs, 16, max_staleness=0).steps(6)
    assert strictly[-1].at == pytest.approx(sum(step.generated.seconds + 60 for step in strictly))
    assert {step.lag for step in strictly} == {0} and {step.lag for step in apart[1:]} == {1}


def test_in_order_at_a_staleness_of_one_is_never_twice_as_fast_and_with_deferring_it_is() -> None:
    shares = [1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4]
    in_order, defer = comparison(32, "store"), comparison(32, "defer")
    for seconds in (10.0, 30.0, 100.0, 300.0):
        costs = Costs(train=seconds, stage=5.0, fetch=10.0)
        together = in_order.colocated(costs).steps_per_hour
        assert in_order.best_split(Costs(train=seconds), shares, 1).steps_per_hour < 2 * together
        if seconds == 30:
            assert defer.best_split(costs, shares, 1).steps_per_hour > 2 * together


def test_short_tails_and_long_training_are_left_to_colocated_runs() -> None:
    costs, shares = Costs(train=300.0, stage=5.0, fetch=10.0), [1 / 2, 3 / 4, 7 / 8]
    runs = comparison(32, "store", 10, "--max-new-tokens", "1638", "--sigma", "0.3")
    assert runs.best_split(costs, shares, 1).steps_per_hour < runs.colocated(costs).steps_per_hour
    assert runs.best_split(costs, shares, 0).steps_per_hour < 0.9 * runs.colocated(costs).steps_per_hour


def test_a_probe_of_every_version_leaves_more_staleness_without_effect() -> None:
    runs = comparison(16, "defer")

    def speed(staleness: int, probe_every: int) -> float:
        return runs.split(Costs(train=60.0, probe_every=probe_every), 12, staleness).steps_per_hour

    assert speed(4, 1) == pytest.approx(speed(1, 1))
    assert speed(4, 0) > 1.05 * speed(1, 0)


def test_what_goes_wrong_costs_time() -> None:
    runs = comparison(16, "store")

    def run(**what) -> Outcome:
        return runs.split(Costs(train=60.0, stage=5.0, fetch=10.0, checkpoint_every=2, **what), 8, 1)

    plain, slow, lost = run(), run(slow_share=0.3), run(failure_seconds=900.0)
    assert slow.steps_per_hour < plain.steps_per_hour and slow.lives == 1
    assert lost.steps_per_hour < plain.steps_per_hour and lost.lives > 1
    assert set(lost.lags) <= {0, 1}
    with pytest.raises(UserError, match="from one checkpoint to the next"):
        run(failure_seconds=1.0)


def test_the_front_prints_and_draws(tmp_path: Path, capsys) -> None:
    picture = tmp_path / "placement.svg"
    words = ["--replicas", "4", "--steps", "3", "--train-shares", "0.5", "--staleness", "0", "1", "--modes"]
    found = placement.main([*words, "--picture", str(picture)])
    assert [(o.policy, o.name) for o in found] == [
        (policy, name)
        for policy in ("store", "defer")
        for name in ("colocated", "split, staleness 0", "split, staleness 1")
    ]
    assert "4 ranks" in capsys.readouterr().out
    text = picture.read_text()
    assert text.count('id="axes_') == 2 and all(f"longest {tail} medians" in text for tail in (2, 5, 10, 20, 40))
    for wrong, line in (
        ("--staleness -1", "--staleness"),
        ("--replicas 1", "two ranks"),
        ("--train-shares 1", "shares"),
    ):
        with pytest.raises(UserError, match=line):
            placement.main(wrong.split())


def carried(replicas: int, num_train: int, staleness: int, lends: bool, **what) -> Carried:
    scene = carried_scene(comparison(replicas, "store").scene, staleness)
    generation = generation_on(scene, replicas - num_train)
    return Carried(generation, Costs(train=30.0, stage=5.0, fetch=10.0, **what), replicas, staleness, lends)


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("failure_seconds", [inf, 400.0])
def test_carried_answers_keep_the_bound_and_every_ticket_is_used_once(lends: bool, failure_seconds: float) -> None:
    for staleness in (1, 2):
        run = carried(16, 8, staleness, lends, failure_seconds=failure_seconds, checkpoint_every=2)
        steps = run.steps(16)
        assert [step.number for step in steps] == list(range(1, 17))
        assert all(0 <= step.lag <= staleness for step in steps) and max(step.lag for step in steps) == staleness
        used = [ticket for step in steps for ticket in step.generated.used]
        assert used == list(range(16 * 32))  # in order, none twice, none lost, whatever was done again
        assert (run.lives > 1) == (failure_seconds < inf)
        assert run.goodput < 0.95 if run.lives > 1 else run.goodput > 0.98


def test_carried_and_lent_runs_beat_waiting_for_the_tail_and_never_the_sum_of_all_work() -> None:
    runs = comparison(32, "store")
    costs = Costs(train=30.0, stage=5.0, fetch=10.0, probe_every=0)
    together = runs.colocated(costs)
    work = 3600 / together.steps_per_hour * (1 - together.generate_idle)  # rank-seconds a rank: W / N + T
    plain = runs.best_split(costs, [0.5], 2).steps_per_hour
    for lends in (False, True):
        best = runs.best_carried(costs, [3 / 8, 1 / 2, 5 / 8], 2, lends)
        assert 1.5 * together.steps_per_hour < best.steps_per_hour and plain < best.steps_per_hour
        assert 3600 / best.steps_per_hour > 0.9 * work  # larger batches of requests run a little more efficiently


@pytest.mark.parametrize("every", [1, 3])
def test_goodput_with_failures_is_the_closed_form(every: int) -> None:
    """Exponential failures at rate r, stretches of s seconds between checkpoints, R to restart: a stretch takes
    (e^(rs) - 1) (1 / r + R) seconds on average, of which s count."""
    scene = comparison(2, "store", 1, "--sigma", "0").scene
    runs = Colocated(Generation(scene), Costs(train=30.0), 2).steps(1)
    seconds, mean, restart = every * runs[0].at, 300.0, 20.0
    expected = seconds / (math.expm1(seconds / mean) * (mean + restart))
    costs = Costs(train=30.0, failure_seconds=mean, restart_seconds=restart, checkpoint_every=every)
    run = Colocated(Generation(scene), costs, 2)
    run.steps(2_000)
    assert run.lives > 100 and run.goodput == pytest.approx(expected, abs=0.02)
