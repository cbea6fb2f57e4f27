"""docs/METRICS.md names metrics that exist, and leaves out none that a run logs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOGGED = re.compile(r'"((?:actor|critic|rollout|train_infer|system)/[a-z_]+(?:/[a-z]+)?)"')
ELSEWHERE = {"actor/entropy_loss", "actor/sft_loss", "actor/abs_advantage", "critic/kl_coef"}
"""Explained by the algorithm's own page."""
DETAILS = ("critic/values", "critic/returns", "critic/clipfrac", "train_infer/ratio", "train_infer/masked")


def test_the_page_and_the_code_name_the_same_metrics() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "spmd_rl").rglob("*.py"))
    page = (ROOT / "docs" / "METRICS.md").read_text()
    first_cells = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    named = {name for cell in first_cells for name in re.findall(r"`([a-z_]+/[a-z_/]+)`", cell)}
    # some are put together: "actor/" before "skipped"
    missing = {name for name in named if f'"{name}"' not in code and f'"{name.partition("/")[2]}"' not in code}
    assert len(named) > 20 and not missing
    silent = {name for name in LOGGED.findall(code) if name not in page and not name.startswith(DETAILS)} - ELSEWHERE
    assert not silent
