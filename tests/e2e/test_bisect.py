"""Two runs that part at a known place, and a step that is executed again."""

import shutil
from pathlib import Path

import pytest

from spmd_rl.tools import again, bisect
from tests.e2e.runs import EXACT, ROOT, Running, Toy
from tests.e2e.test_guarantees import bitwise_equal

SETTINGS = (*EXACT, "journal.hashes=true", "steps=4", "checkpoint.every=2", "rollout.over_sample=0")
FAULTY, WEIGHT = ROOT / "tests/e2e/faulty_rlvr.py", "model.layers.1.mlp.down_proj.weight"


def parted(one: Running, other: Running, capsys, *words: str) -> str:
    """What `bisect` finds; an empty string if the runs are equal."""
    capsys.readouterr()
    code = bisect.main([str(one.run_dir), str(other.run_dir), *words])
    said = capsys.readouterr().out
    assert code == ("first difference: " in said), said
    return said.partition("first difference: ")[2]


def test_a_rerun_has_no_difference(toy: Toy, straight: Running, capsys) -> None:
    killed = toy.start(*SETTINGS, name="rerun")
    killed.wait_for("enter update", step=4)
    killed.kill()
    assert parted(straight, toy.run(*SETTINGS, name="rerun"), capsys) == ""


def test_a_flipped_bit_is_found_in_its_tensor(toy: Toy, straight: Running, capsys) -> None:
    run = toy.run(*SETTINGS, name="flipped", script=FAULTY, env={"FAULTY": WEIGHT})
    said = parted(straight, run, capsys)
    assert said.startswith(f"step 2, weights: policy: model/{WEIGHT}@") and ", rank 1\n" in said, said


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("policy.lr=2e-3", "step 1, update: actor/lr\n  0.001 | 0.002"),
        ("algorithm.clip_low=0.1", ""),
        ("rollout.temperature=0.9", "step 0, eval: 0.0 logprobs, token "),
        ("train.tokens_per_microbatch=64", "step 1, "),
    ],
)
def test_a_setting_is_found_where_it_acts_first(toy: Toy, straight: Running, capsys, setting: str, where: str) -> None:
    run = toy.run(*SETTINGS, setting, "steps=2", name=setting.replace("=", "-"))
    said = parted(straight, run, capsys)
    assert said.startswith(where) and (where or not said), said


def test_another_number_of_threads_is_found_where_it_changes_a_bit(toy: Toy, capsys) -> None:
    """The toy itself has the same bits on one thread and on two; a sum of many numbers has not."""
    how = {"ranks": 1, "script": FAULTY}
    env = {"FAULTY": WEIGHT, "FAULT": "sum"}
    one, two = (
        toy.run(*SETTINGS, "steps=3", name=f"threads-{n}", env={**env, "OMP_NUM_THREADS": n}, **how) for n in "12"
    )
    said = parted(one, two, capsys)
    assert said.startswith(f"step 2, weights: policy: model/{WEIGHT}@0,0, rank 0\n"), said


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("step", [3, 4])
def test_a_step_again_has_the_same_bits(straight: Running, capfd, step: int) -> None:
    """From the checkpoint before it, or over the step between."""
    assert again.main([str(straight.run_dir), "--step", str(step)]) == 0
    assert f"step {step}: no difference from " in capfd.readouterr().out
    out = Running([], straight.run_dir / "again" / f"step-{step:06d}", Path(), "")
    if step == 4:
        assert bitwise_equal(out.weights(step), straight.weights(step))
    assert out.samples(step) == straight.samples(step)
    assert (out.run_dir / "before").exists() == (step == 4)


@pytest.mark.usefixtures("here")
def test_a_step_again_with_another_setting(toy: Toy, straight: Running, capfd) -> None:
    assert again.main([str(straight.run_dir), "--step", "3", "algorithm.clip_low=0.0", "policy.lr=5e-3"]) == 0
    said = capfd.readouterr().out
    assert "step 3 differs from " in said and "first in step 3, update: actor/lr\n  0.001 | 0.005" in said, said
    shutil.rmtree(straight.run_dir / "again")
