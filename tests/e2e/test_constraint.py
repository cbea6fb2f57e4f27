"""Training on answers that have to parse, through the door."""

import json
import sys

import pytest

from tests.e2e.runs import Toy
from tests.e2e.test_agents import AgentToy
from tests.engines import OTHERS, VLLM_SIZES

SCHEMA = {
    "type": "object",
    "properties": {
        "digit": {"type": "integer", "minimum": 0, "maximum": 99},
        "why": {"type": "string", "maxLength": 8},
    },
    "required": ["digit", "why"],
}
SETTINGS = (
    *("policy.dtype=float32", "rollout.max_new_tokens=60", "train.updates_per_step=2", "algorithm.kl_coef=0.01"),
    *("algorithm.entropy_coef=0.01", "algorithm.correction.level=token", "steps=2"),
)


def check(toy: Toy, *settings: str, ranks: int = 2) -> None:
    """Every answer that ended by itself parses; the trainer finds each token as likely as the engine did."""
    schema = toy.path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    started = toy.run(*SETTINGS, f"rollout.constraint.json_schema={schema}", *settings, ranks=ranks)
    for line in started.metrics()[1:]:
        assert line["train_infer/abs_diff/mean"] < (0.2 if line["rollout/stale"] else 1e-4)
        assert line["actor/grad_norm"] > 0 and 0 < line["actor/entropy"] < 4
        assert "critic/kl" in line
    turns = [turn for step in (1, 2) for row in started.samples(step) for turn in row["turns"]]
    whole = [json.loads(turn["text"]) for turn in turns if turn["finish_reason"] == "stop"]
    assert len(whole) > 10 and all(0 <= found["digit"] <= 99 for found in whole)
    apart = [line["train_infer/abs_diff/mean"] for line in started.metrics()[1:]]
    print(f"{len(turns)} answers, {len(whole)} whole; trainer and engine apart by {apart}", file=sys.stderr)


def test_the_native_engine(tmp_path) -> None:
    settings = ("rollout.partial_rollout=true", "rollout.over_sample=2", "rollout.accept=first_finished", "train.tp=2")
    check(Toy(tmp_path), *settings)


@pytest.mark.slow
def test_ranks_that_generate_ahead(tmp_path) -> None:
    """The constraint goes on where a publish came in the middle of an answer."""
    settings = ("rollout.partial_rollout=true", "rollout.over_sample=2", "engine.max_running=4")
    check(Toy(tmp_path), *settings, "placement.mode=split")


@pytest.mark.slow
@pytest.mark.parametrize("engine", OTHERS)
def test_another_engine(tmp_path, engine: str) -> None:
    check(Toy(tmp_path, **VLLM_SIZES), f"engine={engine}", "engine.tp=2")


def test_a_grammar_that_the_compiler_refuses_is_one_line(tmp_path) -> None:
    """What only xgrammar knows, which imports torch."""
    run = Toy(tmp_path).start("rollout.constraint.regex='a(?=b)'", ranks=0)
    assert run.wait() == 2
    (line,) = [line for line in run.text().splitlines() if line.startswith("error: ")]
    assert line.startswith("error: rollout.constraint.regex: ") and "Lookahead is not supported" in line


def test_an_evaluation(tmp_path) -> None:
    toy = Toy(tmp_path)
    toy.door, kept = "spmd_rl.evaluate", ("policy.model", "reward.", "eval.answers", "rollout.max_new")
    settings = [one for one in toy.settings() if one.startswith(kept)]
    toy.settings = lambda: settings
    run = toy.run(f"data.eval={toy.data}", "rollout.constraint.choice=[yes,no]", ranks=0)
    rows = map(json.loads, (run.run_dir / "samples" / "eval-000000.jsonl").read_text().splitlines())
    assert {turn["text"] for row in rows for turn in row["turns"]} == {"yes", "no"}


def test_every_turn_of_an_agent_parses(tmp_path) -> None:
    toy = AgentToy(tmp_path, max_position_embeddings=2048)
    settings = ("rollout.constraint.choice=[walk,run,'stand still']", "warmup.steps=0", "steps=2")
    started = toy.run(*settings, "rollout.max_new_tokens=14", "algorithm.kl_coef=0.01")
    turns = [turn for step in (1, 2) for row in started.samples(step) for turn in row["turns"]]
    assert len(turns) > 10 and all(turn["text"] in ("walk", "run", "stand still") for turn in turns)
    for line in started.metrics()[1:]:
        assert line["train_infer/abs_diff/mean"] < 1e-4
