"""Every placement with what else can be asked for: engines, layouts, algorithms, ways to end a step; both doors."""

import pytest

from tests.e2e.runs import Toy
from tests.e2e.test_agents import AgentToy
from tests.engines import VLLM_SIZES, needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CARRIED = "rollout.partial_rollout=true rollout.over_sample=3 rollout.claim=store"
SWAPPED = f"placement.swap=recompute {CARRIED}"
CASES = {
    "split delta": (3, "split", "publish.delta=true"),
    "split defer": (3, "split", "rollout.tail=defer"),
    "split first finished": (3, "split", "rollout.accept=first_finished"),
    "split static": (3, "split", "rollout.claim=static policy.dtype=float32"),
    "split staleness 3": (3, "split", "placement.max_staleness=3"),
    "split pp": (4, "split", "train.pp=2"),
    "split odd ranks": (4, "split", "placement.train=1,3"),
    "split ppo": (3, "split", "algorithm=ppo"),
    "split reference": (3, "split", "algorithm.kl_coef=0.1"),
    "split remax": (3, "split", "algorithm=remax"),
    "split dppo": (3, "split", "algorithm=dppo"),
    "split corrected": (3, "split", "algorithm.correction.level=sequence algorithm.correction.upper=2"),
    "split keep": (3, "split", f"placement.swap=keep {CARRIED}"),
    "split zero": (3, "split", "train=deepspeed placement.train=1,2"),
    "lent": (2, "lent", ""),
    "lent zero": (3, "lent", f"train=deepspeed train.stage=1 algorithm=ppo {CARRIED}"),
    "lent delta": (3, "lent", f"publish.delta=true {CARRIED}"),
    "lent tp": (4, "lent", f"train.tp=2 {CARRIED}"),
    "lent ppo": (3, "lent", f"algorithm=ppo {CARRIED}"),
    "lent remax": (3, "lent", f"algorithm=remax {CARRIED}"),
    "lent topr": (3, "lent", f"algorithm=topr {CARRIED}"),
    "lent share": (4, "lent", f"placement.generate=25% {CARRIED}"),
    "lent on-policy": (3, "lent", "placement.max_staleness=0"),
    "overlapped alone": (0, "overlapped", ""),
    "overlapped defer": (2, "overlapped", "rollout.tail=defer"),
    "overlapped ppo": (2, "overlapped", "algorithm=ppo"),
    "overlapped remax": (2, "overlapped", "algorithm=remax"),
}
VLLM = {
    "split": (3, "split", ""),
    "split swapped": (3, "split", SWAPPED),
    "split tp swapped": (3, "split", f"placement.train=0 engine.tp=2 publish.delta=true {SWAPPED}"),
    "lent": (3, "lent", CARRIED),
    "lent tp": (4, "lent", f"engine.tp=2 {CARRIED}"),
    "overlapped": (2, "overlapped", ""),
    "overlapped zero": (2, "overlapped", "train=deepspeed train.stage=2"),
    "overlapped tp": (2, "overlapped", "engine.tp=2"),
}
AGENTS = {
    "split": (3, "split", "rollout.claim=store"),
    "split keep": (4, "split", f"placement.swap=keep {CARRIED}"),
    "split starpo": (3, "split", "algorithm=starpo rollout.claim=store"),
    "lent slow": (3, "lent", f"env.echo.args.delay=0.2 env.echo.workers=4 {CARRIED}"),
    "lent turn_gae": (3, "lent", f"algorithm=turn_gae {CARRIED}"),
    "overlapped": (2, "overlapped", ""),
    "overlapped zero": (2, "overlapped", "train=deepspeed algorithm.kl_coef=0.1"),
}
AGENTS_VLLM = {
    "split tp swapped": (3, "split", f"placement.train=0 engine.tp=2 {SWAPPED}"),
    "lent": (3, "lent", CARRIED),
    "overlapped": (2, "overlapped", ""),
}


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> dict[str, Toy]:
    paths = (tmp_path_factory.mktemp(name) for name in ("native", "vllm", "agents", "agents-vllm"))
    agents = {"max_position_embeddings": 2048}
    return {
        "native": Toy(next(paths)),
        "vllm": Toy(next(paths), "qwen2", **VLLM_SIZES),
        "agents": AgentToy(next(paths), **agents),
        "agents-vllm": AgentToy(next(paths), "qwen2", **VLLM_SIZES, **agents),
    }


def trained(toy: Toy, name: str, ranks: int, mode: str, settings: str, *more: str) -> None:
    """It ends well, with a line a step, and no token is older than the placement allows."""
    words = (f"placement.mode={mode}", *settings.split(), *more)
    run = toy.start(*words, "steps=4", ranks=ranks, name=name.replace(" ", "-"))
    assert run.wait(300) == 0, run.text()[-3000:]
    assert "Traceback" not in run.text() and "leaked" not in run.text()
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3, 4]
    most = next((int(word.rpartition("=")[2]) for word in words if word.startswith("placement.max_staleness")), 1)
    assert all(line.get("rollout/lag/max", 0) <= most for line in run.metrics())


@pytest.mark.parametrize("name", CASES)
def test_rlvr(toys: dict[str, Toy], name: str) -> None:
    trained(toys["native"], name, *CASES[name])


@needs_vllm
@pytest.mark.parametrize("name", VLLM)
def test_rlvr_with_vllm(toys: dict[str, Toy], name: str) -> None:
    trained(toys["vllm"], name, *VLLM[name], "engine=vllm")


@pytest.mark.parametrize("name", AGENTS)
def test_agents(toys: dict[str, Toy], name: str) -> None:
    trained(toys["agents"], name, *AGENTS[name])


@needs_vllm
@pytest.mark.parametrize("name", AGENTS_VLLM)
def test_agents_with_vllm(toys: dict[str, Toy], name: str) -> None:
    trained(toys["agents-vllm"], name, *AGENTS_VLLM[name], "engine=vllm")
