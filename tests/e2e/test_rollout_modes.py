"""The door under every way to end a step: what is used, carried and trained on, from the sample log itself."""

import pytest

from tests.e2e.runs import Toy

COMMON = (
    "policy.dtype=float32",
    "rollout.max_new_tokens=16",
    "rollout.over_sample=3",
    "engine.max_running=8",
    "steps=3",
)


def tickets(run, step: int) -> list[int]:
    return sorted({row["ticket"] for row in run.samples(step)})


def test_carried_answers_keep_a_version_for_each_token(tmp_path) -> None:
    uneven = ("rollout.max_new_tokens=40", "rollout.over_sample=8", "engine.max_running=6")  # answers end at all times
    settings = ("rollout.partial_rollout=true", "algorithm.correction.level=token")
    run = Toy(tmp_path).run(*COMMON, *uneven, *settings, name="carry")
    lines = run.metrics()[1:]
    assert sum(line["rollout/carried"] for line in lines) > 0
    assert sum(line["rollout/stale"] for line in lines) > 0
    mixed = 0
    for step in (1, 2, 3):
        for row in run.samples(step):
            for turn in row["turns"]:
                assert turn["versions"] == sorted(turn["versions"]) and max(turn["versions"]) < step
                mixed += len(set(turn["versions"])) > 1
    assert mixed, "no answer went on with the next step's policy"
    used = [ticket for step in (1, 2, 3) for ticket in tickets(run, step)]
    assert used == list(range(len(used)))


@pytest.mark.parametrize("mode", ["rollout.accept=first_finished", "rollout.tail=defer", "rollout.answers_per_claim=1"])
def test_no_ticket_is_used_twice_and_none_is_older_than_its_step(tmp_path, mode: str) -> None:
    run = Toy(tmp_path).run(*COMMON, mode, "reward.toy.args.sleep=0.005", name="mode")
    used = [ticket for step in (1, 2, 3) for ticket in tickets(run, step)]
    assert len(set(used)) == len(used) >= 9
    versions = {
        (step, v) for step in (1, 2, 3) for row in run.samples(step) for t in row["turns"] for v in t["versions"]
    }
    assert versions == {(1, 0), (2, 1), (3, 2)}
    assert all(line["rollout/carried"] == 0 for line in run.metrics()[1:])
    for step in (1, 2, 3):
        rows = run.samples(step)
        assert len({(row["ticket"], row["answer"]) for row in rows}) == len(rows) == 4 * len(tickets(run, step))
