"""A thinking budget through the door: the trainer finds what follows the end of thoughts as likely as the engine."""

import pytest

from tests.e2e.runs import EXACT, Toy
from tests.engines import OTHERS, VLLM_SIZES
from tests.models import tokenizer

SETTINGS = (*EXACT, "rollout.thinking_budget=5", "rollout.thinking_end='</t>'", "rollout.max_new_tokens=16", "steps=2")


def check(started) -> None:
    """A model of random weights seldom says `</t>` by itself, nor the end of its answer."""
    for line in started.metrics()[1:]:
        assert line["train_infer/abs_diff/mean"] < 1e-4 and line["actor/grad_norm"] > 0
    rows = [row for step in (1, 2) for row in started.samples(step)]
    ended = [row["turns"] for row in rows if len(row["turns"]) == 2]
    assert len(ended) > len(rows) / 2
    end = tokenizer().encode("</t>", add_special_tokens=False)
    for first, second in ended:
        assert first["finish_reason"] == "length" and second["prompt_ids"] == end
        assert 0 < len(second["token_ids"]) <= 16 - 5 - len(end) and len(first["token_ids"]) == 5


def test_the_native_engine(tmp_path) -> None:
    check(Toy(tmp_path).run(*SETTINGS, ranks=2))


@pytest.mark.slow
@pytest.mark.parametrize("engine", OTHERS)
def test_another_engine(tmp_path, engine: str) -> None:
    check(Toy(tmp_path, **VLLM_SIZES).run(*SETTINGS, f"engine={engine}", ranks=2))
