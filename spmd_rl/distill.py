"""Distillation on the policy's own answers: `python -m spmd_rl.rlvr`, whose loop and settings it has, with a teacher.

    torchrun --nproc-per-node 2 -m spmd_rl.distill policy.model=A teacher.model=B data=jsonl_math data.train=rows.jsonl

Agents learn from a teacher in `spmd_rl.agentic`, and from written answers in `spmd_rl.sft`.
"""

from spmd_rl.config import RlvrConfig, main
from spmd_rl.config.values import require
from spmd_rl.rlvr import run as rlvr

NO_TEACHER = (
    "teacher.model: must name the model to learn from, or set teacher.hint. For demo_distill, run "
    "python -m spmd_rl.sft +experiment=demo_sft run.dir=runs/teacher, then teacher.model=runs/teacher"
)


def run(cfg: RlvrConfig) -> None:
    """Train until step `cfg.steps`, from the newest checkpoint if any."""
    require(bool(cfg.teacher.by_domain), NO_TEACHER)
    rlvr(cfg)


if __name__ == "__main__":
    main("rlvr", RlvrConfig, run, preview="spmd_rl.tools.dry_run:show")
