"""Training on answers that were drawn among a part of the tokens and ended by stop strings, through the door."""

import pytest

from tests.e2e.runs import Toy
from tests.engines import OTHERS, VLLM_SIZES

SETTINGS = (
    *("policy.dtype=float32", "rollout.top_p=0.8", "rollout.min_p=0.01", "rollout.top_k=60", "rollout.temperature=1.2"),
    *("rollout.max_new_tokens=24", "rollout.stop=[e,'1']", "train.updates_per_step=2", "algorithm.kl_coef=0.01"),
    *("algorithm.correction.level=token", "steps=3", "eval.top_k=5"),
)


def check(started) -> None:
    """The trainer finds each token as likely as the engine did; a stop string ends its answer."""
    for line in started.metrics()[1:]:
        assert line["train_infer/abs_diff/mean"] < (0.2 if line["rollout/stale"] else 1e-4)
        assert line["actor/grad_norm"] > 0 and 0 < line["actor/entropy"] < 4.1  # ln 60
    assert 0 < abs(started.metrics()[-1]["critic/kl"]) < 1
    rows = [row for step in (1, 2, 3) for row in started.samples(step)]
    reasons = set()
    for (turn,) in (row["turns"] for row in rows):
        reasons.add(turn["finish_reason"])
        said = [stop in turn["text"] for stop in "e1"]
        assert any(said) <= (turn["finish_reason"] == "stop")
        assert sum(map(turn["text"].count, "e1")) <= 1
    assert reasons == {"stop", "length"}


def test_the_native_engine(tmp_path) -> None:
    settings = ("rollout.partial_rollout=true", "rollout.over_sample=2", "rollout.accept=first_finished")
    check(Toy(tmp_path).run(*SETTINGS, *settings, ranks=2))


@pytest.mark.slow
@pytest.mark.parametrize("engine", OTHERS)
def test_another_engine(tmp_path, engine: str) -> None:
    check(Toy(tmp_path, **VLLM_SIZES).run(*SETTINGS, f"engine={engine}", ranks=2))
