"""TRL's DPOTrainer on pairs of a file, in its order: frozen for `tests/e2e/test_hh_rlhf.py`. Runs in TRL's own venv.

.venv/bin/python -m tests.e2e.test_hh_rlhf > pairs.jsonl
.venv-trl/bin/python -W ignore bench/trl_dpo.py pairs.jsonl | tail -1 > tests/e2e/trl_hh_rlhf.json
"""

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer

MODEL = str(Path("~/.cache/spmd_rl/models/smollm2-135m-instruct").expanduser())
PAIRS_PER_STEP, LR, BETA = 2, 2e-6, 0.1


class Kept(TrainerCallback):
    """What each step logs."""

    def __init__(self) -> None:
        self.found = []

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs:
            self.found.append([logs["loss"], logs["rewards/margins"]])


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    kept = Kept()
    settings = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        max_steps=len(rows) // PAIRS_PER_STEP,
        per_device_train_batch_size=PAIRS_PER_STEP,
        learning_rate=LR,
        lr_scheduler_type="constant",
        beta=BETA,
        max_length=None,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        disable_dropout=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = DPOTrainer(model=MODEL, args=settings, train_dataset=Dataset.from_list(rows), callbacks=[kept])
    trainer._get_train_sampler = lambda *_: None  # in the order of the file
    trainer.train()
    print(json.dumps(kept.found))


if __name__ == "__main__":
    main()
