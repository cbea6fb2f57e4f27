"""What a plan says that each rank holds at its peak, against what real ranks hold: SmolLM2-135M on the CPU, over gloo.

Of the real ranks every live storage is counted, and the growth of their resident set is shown beside it.
"""

import resource
from typing import Any

import pytest

from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import World
from spmd_rl.learn.losses import bind_loss
from spmd_rl.tools.plan.memory_tracker import MemoryTracker
from spmd_rl.tools.plan.rank import full_batch, trace
from spmd_rl.train import build_role
from tests.dist.harness import run_ranks

TOKENS = 256
TRANSPORT = "transport"
LAYOUTS = {"fsdp 2": (2, []), "tp 3": (3, ["train.tp=3"]), "pp 2": (2, ["train.pp=2"]), "cp 2": (2, ["train.cp=2"])}


def settings(overrides: list[str]) -> RlvrConfig:
    common = ["policy.dtype=float32", "plan.device=cpu", f"train.tokens_per_microbatch={TOKENS}"]
    lengths = ["rollout.max_prompt_tokens=64", "rollout.max_new_tokens=64", "rollout.prompts_per_step=16"]
    return load("rlvr", RlvrConfig, [*common, *lengths, "rollout.answers_per_prompt=4", *overrides])


def resident() -> int:
    """The peak of this process' resident set, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(world: World, overrides: list[str], count: int) -> dict[str, Any]:
    """Peaks of a real update of so many micro-batches."""
    cfg, before = settings(overrides), resident()
    with MemoryTracker() as book:
        role = build_role(cfg.role("policy"), world)
        batch = full_batch(cfg.algorithm, 128, count, TOKENS, 49152)
        with book.window("publish"):
            for _ in role.weights():
                pass
        with book.window("update"):
            role.update(batch, bind_loss(cfg.algorithm), 1.0)
    for entry in book.entries:
        if entry.made_by == "aten::from_file":  # through which ranks of one machine meet: no rank's own
            entry.tag = TRANSPORT
    found = {window: book.peak(book.span(window), [TRANSPORT]).total for window in ("publish", "update")}
    return found | {"grown": resident() - before}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_ranks_hold_what_was_planned(layout: str, capsys: pytest.CaptureFixture) -> None:
    size, overrides = LAYOUTS[layout]
    count = 3 if layout.startswith("pp") else 2
    found = run_ranks(size, measured, overrides, count, timeout=280)
    for rank, real in enumerate(found):
        planned = trace(settings(overrides), rank, size)
        for phase in ("publish", "update"):
            (part,) = planned.phases[phase]
            with capsys.disabled():
                grown = f", resident set +{real['grown'] / 1e6:.0f} MB" if phase == "update" else ""
                print(f"{layout}, rank {rank}, {phase}: planned {part.peak.total / 1e6:.1f} MB, "
                      f"counted {real[phase] / 1e6:.1f} MB{grown}")  # fmt: skip
            assert part.peak.total == pytest.approx(real[phase], rel=0.1)
