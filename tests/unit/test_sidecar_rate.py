"""The sidecar's benchmark in small: what a verdict costs, and that killed workers cost no verdict."""

import pytest

from bench.sidecar import back, kill, latency, rate, scorer, workers_of


@pytest.mark.slow
def test_what_a_thousand_verdicts_cost():
    """In processor time, which other work on the machine hardly changes."""
    with scorer(workers=2) as client:
        costs = min(rate(client, 5000)["cpu_ms"] for _ in range(3))
        steady = latency(client, load=500.0, seconds=0.5)
    print(f"\n{costs:.0f} CPU-ms for 1000 verdicts, p50 {steady['p50_ms']:.2f} ms")
    assert costs < 100.0


@pytest.mark.slow
def test_half_the_workers_killed_at_full_speed():
    with scorer(workers=4) as client:
        before = {worker.pid for worker in workers_of(client)}
        figures = kill(client, 60_000)  # a second or so: the kill must fall into it
        after = {worker.pid for worker in workers_of(client)}
    assert figures["wrong"] == 0
    assert len(after) == 4 and len(before & after) <= 2


def test_back_is_the_end_of_the_first_good_slice_after_the_kill():
    assert back([100, 100, 90, 0, 10, 80, 100], killed_at=0.7) == 1.5 - 0.7
    assert back([100, 100, 90, 0, 10, 20], killed_at=0.7) is None
