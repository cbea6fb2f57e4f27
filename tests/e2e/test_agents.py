"""Agents through the real door: guarantees E and S, whatever plays the environments."""

import time

import psutil
import pytest

from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.test_guarantees import bitwise_equal, difference, tokens
from tests.engines import OTHERS, VLLM_SIZES

SETTINGS = (
    "algorithm=gigpo",
    "env.echo.target=tests.e2e.toy_env:Echo",
    "env.echo.pattern=all",
    "env.echo.system=''",
    "rollout.prompts_per_step=3",
    "rollout.answers_per_prompt=4",
    "rollout.max_new_tokens=4",
    "rollout.max_turns=3",
    "rollout.max_prompt_tokens=200",
    "rollout.over_sample=0",
    "warmup.steps=1",
    "warmup.episodes=3",
    "eval.every=3",
    "eval.prompts=3",
    "policy.lr=1e-3",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "checkpoint.export_hf=true",
    *EXACT,
)


class AgentToy(Toy):
    """A tiny model and an environment that any text plays."""

    door = "spmd_rl.agentic"

    def settings(self) -> list[str]:
        return [f"policy.model={self.model}", *SETTINGS]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> AgentToy:
    return AgentToy(tmp_path_factory.mktemp("toy"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def straight(toy: AgentToy) -> Running:
    return toy.run("steps=3", name="straight")


def test_a_resumed_run_is_bitwise_the_same_whatever_plays_the_environments(toy: AgentToy, straight: Running) -> None:
    toy.run("steps=2", "env.echo.workers=3", "env.echo.mode=process", name="resumed")
    resumed = toy.run("steps=3", "env.echo.workers=2", "env.echo.envs_per_worker=3", name="resumed")
    assert f"\nresumed from step 2: {resumed.run_dir}/checkpoints/step-000002\n" in resumed.text()
    assert "resumed" not in straight.text()
    assert [tokens(resumed, step) for step in (1, 2, 3)] == [tokens(straight, step) for step in (1, 2, 3)]
    assert bitwise_equal(resumed.weights(3), straight.weights(3))
    lengths = {len(sample["turns"]) for step in (2, 3) for sample in straight.samples(step)}
    assert len(lengths) > 1  # or nothing would show that episodes end on their own
    assert straight.metrics()[-1]["actor/abs_advantage"] > 0


def test_a_warm_up_has_no_engine_to_differ_from(straight: Running) -> None:
    warmup, trained = (line.keys() for line in straight.metrics()[1:3])
    assert "warmup/loss" in warmup and not [key for key in warmup if key.startswith("train_infer/")]
    assert "train_infer/abs_diff/mean" in trained and "train_infer" not in straight.text()


def test_one_rank_plays_the_same_episodes(toy: AgentToy, straight: Running) -> None:
    alone = toy.run("steps=2", ranks=0, name="alone")
    assert [tokens(alone, step) for step in (1, 2)] == [tokens(straight, step) for step in (1, 2)]
    assert difference(alone.weights(2), straight.weights(2)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("train", ["train=deepspeed", "train=megatron train.tp=2", "train=megatron train.pp=2"])
def test_another_backend_learns_the_same_from_the_same_episodes(toy: AgentToy, straight: Running, train: str) -> None:
    other = toy.run("steps=3", *train.split(), name=train.replace(" ", "-"))
    assert [tokens(other, step) for step in (1, 2, 3)] == [tokens(straight, step) for step in (1, 2, 3)]
    norms = [[line["actor/grad_norm"] for line in run.metrics()[2:]] for run in (other, straight)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert difference(other.weights(3), straight.weights(3)) < 1e-4


def test_on_ranks_of_their_own_they_play_the_same_episodes(toy: AgentToy, straight: Running) -> None:
    alone = toy.run("steps=3", ranks=1, name="alone")
    split = toy.run("steps=3", "placement.mode=split", "placement.max_staleness=0", name="split")
    assert [tokens(split, step) for step in (1, 2, 3)] == [tokens(straight, step) for step in (1, 2, 3)]
    assert difference(split.weights(3), straight.weights(3)) < 1e-4
    assert bitwise_equal(split.weights(3), alone.weights(3)), "with as many data shards"
    assert split.metrics()[-1]["val/echo/success"] == straight.metrics()[-1]["val/echo/success"]


@pytest.mark.slow
def test_lent_ranks_play_on_what_others_left(toy: AgentToy) -> None:
    """Learning rate 0 and a slow environment: episodes are the same, whoever plays them to their end."""
    settings = ("steps=4", "policy.lr=0", "warmup.steps=0", "eval.every=0", "env.echo.args.delay=0.02")
    straight = toy.run(*settings, name="lr-0")
    carried = ("rollout.partial_rollout=true", "rollout.over_sample=2", "rollout.claim=store")
    lent = toy.run(*settings, *carried, "placement.mode=lent", "placement.train=0-1", ranks=3, name="lent")
    assert [tokens(lent, step) for step in (1, 2, 3, 4)] == [tokens(straight, step) for step in (1, 2, 3, 4)]


def test_turns_of_fresh_prompts_are_segments_of_their_trajectory(toy: AgentToy) -> None:
    run = toy.run("steps=2", "env.echo.history=1", "warmup.steps=0", "eval.every=0", name="fresh")
    samples = run.samples(2)
    assert len(samples) > 12 and all(len(sample["turns"]) == 1 for sample in samples)
    assert run.metrics()[-1]["env/echo/segments"] > 1.5
    assert run.metrics()[-1]["actor/grad_norm"] > 0


def test_spare_episodes_are_given_up(toy: AgentToy) -> None:
    overrides = ("steps=1", "rollout.redundancy=2", "env.echo.args.delay=0.02", "warmup.steps=0", "eval.every=0")
    run = toy.run(*overrides, name="spare")
    answers = [(sample["ticket"], sample["answer"]) for sample in run.samples(1)]
    assert len(answers) == len(set(answers)) == 12


def test_killed_workers_and_a_killed_host_cost_no_run(toy: AgentToy, straight: Running) -> None:
    run = toy.start("steps=3", "env.echo.args.delay=1.5", "env.echo.mode=process", name="killed")
    metrics, deadline = run.run_dir / "metrics.jsonl", time.time() + 90
    while not metrics.exists() or '"step":1' not in metrics.read_text():
        assert time.time() < deadline, run.text()[-3000:]
        time.sleep(0.1)
    time.sleep(0.5)  # the environments of the second step nap for seconds
    for victim in ("worker", "host"):
        psutil.Process(run.pid(victim)).kill()
    assert run.wait() == 0, run.text()[-3000:]
    assert [len(run.samples(step)) for step in (2, 3)] == [len(straight.samples(step)) for step in (2, 3)]
    assert run.metrics()[-1]["rollout/error_share"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("engine", OTHERS)
def test_another_engine_plays_too(tmp_path, engine: str) -> None:
    toy = AgentToy(tmp_path, "qwen2", **VLLM_SIZES)
    run = toy.start(f"engine={engine}", "steps=2", "eval.every=0", name=engine)
    assert run.wait(400) == 0, run.text()[-3000:]
    trained = run.metrics()[2]
    assert trained["train_infer/abs_diff/mean"] < 1e-4 and trained["actor/grad_norm"] > 0
    assert len({len(sample["turns"]) for sample in run.samples(2)}) > 1


@pytest.mark.slow
def test_overlapped_agents_are_one_step_off(toy: AgentToy, straight: Running) -> None:
    """A trajectory may have turns of two policies: those before a slow reply, and those after it."""
    settings = ("placement.mode=overlapped", "placement.patience=0.05", "env.echo.args.delay=0.4", "steps=5")
    run = toy.run(*settings, "env.echo.workers=4", name="overlapped")
    assert tokens(run, 2) == tokens(straight, 2)  # the first after the warm-up
    found = [
        [step - 1 - version for turn in sample["turns"] for version in turn["versions"]]
        for step in (3, 4, 5)
        for sample in run.samples(step)
    ]
    assert {lag for lags in found for lag in lags} == {0, 1}
    assert all(lags == sorted(lags, reverse=True) for lags in found) and any(len(set(lags)) == 2 for lags in found)
    lines = run.metrics()
    assert all(line["rollout/error_share"] == 0 for line in lines[2:])
    assert all(line["placement/overlap_seconds"] > 0 for line in lines[3:])
