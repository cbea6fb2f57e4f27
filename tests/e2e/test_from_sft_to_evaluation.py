"""The page docs/FROM_SFT_TO_EVALUATION.md: its commands, one after the other, on the model that they name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

PAGE = (ROOT / "docs" / "FROM_SFT_TO_EVALUATION.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_loss_falls_and_then_the_score_rises(tmp_path: Path) -> None:
    script = "set -e\n" + "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = [
        json.loads((tmp_path / "runs" / "sums" / name / "evaluation.json").read_text())["results"]["all"]
        for name in ("before", "after_sft", "after_rl")
    ]
    assert [one["num_prompts"] for one in found] == [64] * 3
    before, tuned, learned = found
    assert learned["score/mean"] > max(before["score/mean"], tuned["score/mean"]) + 0.15, found
    assert learned["score_greedy/mean"] > before["score_greedy/mean"] + 0.1, found
    lines = (tmp_path / "runs" / "sums" / "sft" / "metrics.jsonl").read_text().splitlines()
    losses = [line["val/loss"] for line in map(json.loads, lines) if "val/loss" in line]
    assert losses[-1] < 0.5 * losses[0], losses
    assert (tmp_path / "runs" / "sums" / "compare.html").exists()
