"""The first 20 losses and margins of DPO on pairs of hh-rlhf are TRL's, frozen by `bench/trl_dpo.py`.

python -m tests.e2e.test_hh_rlhf > pairs.jsonl    # what TRL was given: the rows in the order of our steps
"""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from spmd_rl.config.sections.preference import PairsConfig
from spmd_rl.data import Examples
from spmd_rl.model.tokenizer import load_tokenizer
from tests.e2e.runs import ROOT, Toy

FILE = Path(os.environ.get("SPMD_RL_DATA", ROOT.parent / "shared" / "data")) / "hh_rlhf" / "harmless_base_test.jsonl.gz"
MODEL = Path("~/.cache/spmd_rl/models/smollm2-135m-instruct").expanduser()
FROZEN = Path(__file__).with_name("trl_hh_rlhf.json")
STEPS, PAIRS_PER_STEP, MOST_TOKENS = 20, 2, 110


def short_pairs() -> list[dict]:
    """The first pairs that are short enough."""
    tokenizer, found = load_tokenizer(MODEL), []
    with gzip.open(FILE, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            if max(len(tokenizer.encode(row[side])) for side in ("chosen", "rejected")) < MOST_TOKENS:
                found.append({side: row[side] for side in ("chosen", "rejected")})
            if len(found) == STEPS * PAIRS_PER_STEP:
                return found
    raise AssertionError("too few")


def write(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in short_pairs()))
    return path


class Hh(Toy):
    """The door on the real model."""

    door = "spmd_rl.dpo"

    def settings(self) -> list[str]:
        data = [
            f"data.train={write(self.path / 'pairs.jsonl')}",
            "data.holdout=0",
            f"data.rows_per_step={PAIRS_PER_STEP}",
        ]
        model = [f"policy.model={MODEL}", "policy.dtype=float32", "policy.lr=2e-6", "preference.beta=0.1"]
        return [*data, *model, f"steps={STEPS}", "eval.every=0", "journal.stall_seconds=600"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not FILE.exists() or not MODEL.exists(), reason="needs hh-rlhf and SmolLM2")
def test_the_first_losses_and_margins_are_those_of_trl(tmp_path: Path) -> None:
    run = Hh(tmp_path).start(ranks=0, name="run")
    assert run.wait(2900) == 0, run.text()[-3000:]
    found = [[line["dpo/loss"], line["rewards/margins"]] for line in run.metrics() if line["step"]]
    wanted = json.loads(FROZEN.read_text())
    assert len(found) == len(wanted) == STEPS and abs(wanted[-1][1]) > 0.01
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


if __name__ == "__main__":
    where = write(Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/short_pairs.jsonl"))
    store = Examples.load(PairsConfig(train=str(where), holdout=0.0), "preference").train
    rows = where.read_text().splitlines()
    print("\n".join(rows[store.at(place, 0)[1]] for place in range(len(rows))))
