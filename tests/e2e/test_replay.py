"""A run's rollouts dumped, and trained on again without an engine: the same weights to the bit."""

from pathlib import Path

import pytest

from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.test_agents import AgentToy
from tests.e2e.test_guarantees import bitwise_equal, difference, tokens

STEPS = range(1, 4)
RLVR = (*EXACT, "steps=3", "rollout.answers_per_claim=3", "rollout.top_k=20", "algorithm.old_logprobs=engine")
"""Groups in two slices, candidates of each token, and logprobs of the engine that the loss divides by."""
AGENTIC = ("steps=3", "warmup.steps=0", "env.echo.history=1")
DUMP = "rollout.dump=true"


@pytest.fixture(scope="module")
def dumped(toy: Toy) -> Running:
    return toy.run(*RLVR, DUMP, name="dumped")


def replayed(toy: Toy, run: Running, *settings: str, name: str = "replayed", **how) -> Running:
    """The same command with `rollout.replay`, in which nobody generates or scores."""
    again = toy.run(*settings, f"rollout.replay={run.run_dir}", name=name, **how)
    spoken = {(event.get("phase"), event.get("name")) for event in again.events(0)}
    assert not [pair for pair in spoken if "publish" in pair or "eval" in pair]
    return again


def check_same(run: Running, again: Running) -> None:
    assert all(bitwise_equal(run.weights(step), again.weights(step)) for step in STEPS)
    assert not bitwise_equal(run.weights(1), run.weights(3))
    assert [tokens(run, step) for step in STEPS] == [tokens(again, step) for step in STEPS]
    for ours, theirs in zip(again.metrics()[1:], run.metrics()[1:], strict=True):
        names = [key for key in theirs if key.partition("/")[0] in ("actor", "critic", "score", "train_infer")]
        assert names and {key: ours.get(key) for key in names} == {key: theirs[key] for key in names}


def test_rlvr_has_the_same_weights(toy: Toy, dumped: Running) -> None:
    run = replayed(toy, dumped, *RLVR)
    check_same(dumped, run)
    assert "has no effect while rollout.replay is given" in run.text()  # rollout.over_sample of the toy


def test_agents_have_the_same_weights(tmp_path: Path) -> None:
    toy = AgentToy(tmp_path, max_position_embeddings=2048)
    run = toy.run(*AGENTIC, DUMP, name="dumped")
    check_same(run, replayed(toy, run, *AGENTIC))


def test_what_other_ranks_have_generated_has_the_same_weights(toy: Toy) -> None:
    split = toy.run(*RLVR, DUMP, "placement.mode=split", "placement.train=0-1", "eval.every=0", ranks=3, name="split")
    check_same(split, replayed(toy, split, *RLVR, name="of-split"))


def test_other_ranks_share_the_files_out(toy: Toy, dumped: Running) -> None:
    for ranks in (0, 3):
        run = replayed(toy, dumped, *RLVR, name=f"on-{ranks}", ranks=ranks)
        assert [tokens(run, step) for step in STEPS] == [tokens(dumped, step) for step in STEPS]
        assert difference(run.weights(3), dumped.weights(3)) < 1e-4


def test_a_replay_resumes(toy: Toy, dumped: Running) -> None:
    replayed(toy, dumped, *RLVR, "steps=1", name="resumed")
    check_same(dumped, replayed(toy, dumped, *RLVR, name="resumed"))


def test_the_end_of_a_dump_is_one_line(toy: Toy, dumped: Running) -> None:
    run = toy.start(*RLVR, f"rollout.replay={dumped.run_dir}", "steps=5", name="longer", ranks=0)
    assert run.wait() == 2
    assert f"error: rollout.replay: {dumped.run_dir} ends with step 3, and steps=5; set steps=3" in run.text()


def test_a_damaged_file_is_named(toy: Toy, dumped: Running) -> None:
    part = dumped.run_dir / "rollouts" / "step-000002.rank-1.bin"
    content = part.read_bytes()
    part.write_bytes(content[:-9])
    run = toy.start(*RLVR, f"rollout.replay={dumped.run_dir}", name="damaged", ranks=2)
    code = run.wait()
    part.write_bytes(content)
    assert code == 1
    assert f"error: rollout.replay: a file of {part.parent / 'step-000002'} cannot be read: " in run.text()
