"""Placements with what else meets their seams: other roles, layouts, engines and agents.

Loop, learner and engine are the same in every placement, so that each is tested once and no list here has all pairs.
"""

import pytest

from tests.e2e.runs import Toy
from tests.e2e.test_agents import AgentToy
from tests.engines import OTHERS, VLLM_SIZES, needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CARRIED = "rollout.partial_rollout=true rollout.over_sample=3 rollout.claim=store"
CASES = {
    "split ppo": (3, "split", "algorithm=ppo"),  # a critic on the ranks that train alone
    "split remax": (3, "split", "algorithm=remax"),  # greedy answers come from other ranks
    "split pp": (4, "split", "train.pp=2"),  # stages share out what is published
    "split zero": (3, "split", "train=deepspeed placement.train=1,2"),  # its groups are not all of the job's ranks
    "split megatron": (3, "split", "train=megatron train.pp=2 placement.train=1,2"),
    "lent": (2, "lent", ""),  # nothing is carried
    "lent tp": (4, "lent", f"train.tp=2 {CARRIED}"),  # ranks of one data shard generate apart
    "lent on-policy": (3, "lent", "placement.max_staleness=0"),
    "overlapped alone": (0, "overlapped", ""),
}


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> dict[str, Toy]:
    paths = (tmp_path_factory.mktemp(name) for name in ("native", "vllm", "agents"))
    return {
        "native": Toy(next(paths)),
        "vllm": Toy(next(paths), "qwen2", **VLLM_SIZES),
        "agents": AgentToy(next(paths), max_position_embeddings=2048),
    }


def trained(toy: Toy, name: str, ranks: int, mode: str, settings: str) -> None:
    """It ends well, with a line a step, and no token is older than the placement allows."""
    words = (f"placement.mode={mode}", *settings.split())
    run = toy.start(*words, "steps=4", ranks=ranks, name=name.replace(" ", "-"))
    assert run.wait(300) == 0, run.text()[-3000:]
    assert "Traceback" not in run.text() and "leaked" not in run.text()
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3, 4]
    most = next((int(word.rpartition("=")[2]) for word in words if word.startswith("placement.max_staleness")), 1)
    assert all(line.get("rollout/lag/max", 0) <= most for line in run.metrics())


@pytest.mark.parametrize("name", CASES)
def test_rlvr(toys: dict[str, Toy], name: str) -> None:
    trained(toys["native"], name, *CASES[name])


@pytest.mark.parametrize("engine", OTHERS)
def test_an_engine_over_ranks_that_generate_ahead(toys: dict[str, Toy], engine: str) -> None:
    trained(toys["vllm"], f"overlapped tp {engine}", 2, "overlapped", f"engine.tp=2 engine={engine}")


@needs_vllm
def test_weights_in_8_bits_travel_to_ranks_that_generate(toys: dict[str, Toy]) -> None:
    trained(toys["vllm"], "split fp8", 2, "split", "engine=vllm engine.quantization=w8a8_fp8")


def test_agents_with_a_critic_whose_policy_changes_in_the_middle_of_turns(toys: dict[str, Toy]) -> None:
    trained(toys["agents"], "agents", 4, "split", f"algorithm=turn_gae {CARRIED}")
