"""The tail on real processes: an engine that sleeps, a real store and a real sidecar, long-tail lengths."""

import pytest

from bench.rollout import ANSWERS, PROMPTS, lengths, measure, simulated

STEPS = 10


def test_deferring_the_tail_takes_at_most_three_fifths_of_the_time_of_static_batches() -> None:
    virtual = simulated("defer", STEPS)
    num_steps = len(virtual)
    static, defer = measure("static batch", num_steps), measure("defer", num_steps)
    num_groups = 4 * PROMPTS
    assert {row[2] for row in static + defer} == {num_groups}, "groups a step"
    assert {row[4] for row in static + defer} == {0}, "stale answers"
    first = [sum(lengths(0).of(ticket, ANSWERS)) for ticket in range(num_groups * num_steps)]
    assert sum(row[3] for row in static) == sum(first)

    took = {"static": sum(row[0] for row in static), "defer": sum(row[0] for row in defer)}
    bubble = {
        name: sum(row[0] * row[1] for row in rows) / took[name] for name, rows in (("static", static), ("defer", defer))
    }
    ratio = took["defer"] / took["static"]
    told = f"{num_steps} steps: {took} s, ratio {ratio:.2f}, bubble {bubble}"
    print(told)
    assert ratio <= 0.6, told
    assert bubble["defer"] < bubble["static"], told
    expected = sum(s.seconds for s in virtual) / sum(s.seconds for s in simulated("static batch", num_steps))
    assert ratio == pytest.approx(expected, abs=0.12), "the simulator says something else"
