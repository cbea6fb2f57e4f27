"""Distillation through the real doors: on policy and off policy, killed and continued to the bit; mistakes by name."""

import json

import pytest

from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.test_guarantees import bitwise_equal
from tests.models import tiny

STEPS = 3
UPDATE = "collective update: gradient norm and averages"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = Toy(tmp_path_factory.mktemp("toy"))
    tiny("llama", toy.path / "teacher", seed=5, hidden_size=96, intermediate_size=96)
    return toy


@pytest.fixture(scope="module")
def settings(toy: Toy) -> tuple[str, ...]:
    teacher = (f"teacher.model={toy.path}/teacher", "teacher.top_k=20", "teacher.train.tp=2", "eval.every=0")
    return (*EXACT, *teacher, f"steps={STEPS}", "rollout.filter.zero_variance=false", "rollout.over_sample=0")


@pytest.fixture(scope="module")
def straight(toy: Toy, settings: tuple[str, ...]) -> Running:
    return toy.run(*settings, name="straight")


def killed_and_continued(toy: Toy, *settings: str, name: str) -> Running:
    """A run whose processes were all killed (-9) in the update of step 2, and that was started again."""
    killed = toy.linger(UPDATE, *settings, name=name)
    killed.wait_for(UPDATE)
    killed.kill()
    again = toy.run(*settings, name=name)
    assert "resumed from step 1: " in again.text()
    return again


def test_a_run_that_is_killed_goes_on_to_the_bit(toy: Toy, settings: tuple[str, ...], straight: Running) -> None:
    """Its teacher has another width and another layout than the policy."""
    assert all(line["distill/loss"] > 0 for line in straight.metrics()[1:])
    assert straight.metrics()[-1]["distill/reverse_kl"] != 0 and straight.metrics()[-1]["actor/grad_norm"] > 0
    again = killed_and_continued(toy, *settings, name="killed")
    assert bitwise_equal(again.weights(STEPS), straight.weights(STEPS))


def test_other_ranks_generate_and_the_samples_are_the_same(
    toy: Toy, settings: tuple[str, ...], straight: Running
) -> None:
    placed = ("placement.mode=split", "placement.max_staleness=0", "teacher.train.tp=1")
    split = toy.run(*settings, *placed, "steps=1", name="split")
    found, wanted = split.metrics()[1], straight.metrics()[1]
    assert found["distill/loss"] == pytest.approx(wanted["distill/loss"], abs=1e-5)


def test_the_policy_teaches_itself_with_a_hint(toy: Toy, settings: tuple[str, ...]) -> None:
    alone = tuple(one for one in settings if not one.startswith(("teacher.model", "teacher.train")))
    hint = ("teacher.model=null", "teacher.hint='{answer}, says a friend'", "algorithm=reinforce", "policy.lr=1e-2")
    run = toy.run(*alone, *hint, "steps=6", "checkpoint.every=0", ranks=2, name="hinted")
    losses = [line["distill/loss"] for line in run.metrics()[1:]]
    assert 0 < losses[-1] < losses[0]
    refused = Rows(toy.path).start("teacher.hint=no", ranks=0, name="hinted-rows")
    assert refused.wait() == 2 and "error: teacher.hint: is for answers that the policy samples" in refused.text()


class Rows(Toy):
    """Written rows, of which a teacher says what else could stand there."""

    door = "spmd_rl.sft"

    def settings(self) -> list[str]:
        rows = [{"prompt": f"say {i}", "completion": f"{i * i}"} for i in range(40)]
        (self.path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [
            f"policy.model={self.model}",
            f"data.train={self.path}/rows.jsonl",
            "data.rows_per_step=8",
            "policy.lr=1e-3",
            "policy.dtype=float32",
            "checkpoint.every=1",
            "checkpoint.keep=9",
            "checkpoint.export_hf=true",
            "steps=2",
        ]


def test_written_answers_with_a_teacher_go_on_to_the_bit_after_a_kill(toy: Toy) -> None:
    rows, teacher = Rows(toy.path), (f"teacher.model={toy.path}/teacher", "teacher.loss=forward_kl")
    straight = rows.run(*teacher, name="rows")
    again = killed_and_continued(rows, *teacher, name="killed-rows")
    assert bitwise_equal(again.weights(2), straight.weights(2))
    lines = straight.metrics()[1:]
    assert all(line["sft/loss"] == pytest.approx(line["distill/loss"], rel=1e-5) for line in lines)  # alone
    mixed = rows.run(*teacher, "teacher.only=false", "steps=1", name="mixed-rows").metrics()[1]
    assert mixed["sft/loss"] > mixed["distill/loss"] == pytest.approx(lines[0]["distill/loss"], rel=1e-5)


@pytest.mark.parametrize("role", ["teacher", "teacher.toy", "reference"])
def test_another_vocabulary_is_an_error_by_name(toy: Toy, settings: tuple[str, ...], role: str) -> None:
    other = toy.path / "other"
    if not other.exists():
        tiny("llama", other, seed=6)
        path = other / "tokenizer.json"
        path.write_text(path.read_text().replace("<|im_end|>", "<|other|>"))
    more = ("algorithm.kl_coef=0.1",) if role == "reference" else ()
    run = toy.start(*settings, *more, f"{role}.model={other}", ranks=1, name=f"other-{role}")
    line = f"error: {role}.model: {other} has a different vocabulary from policy.model's: id 258 is '<|other|>' there"
    assert run.wait() == 2 and line in run.text()
