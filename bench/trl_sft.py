"""TRL's SFTTrainer on the work that a JSON file describes, held at the gate before each step. Runs in TRL's own venv.

As fast as its own settings make it on a CPU: bfloat16 autocast over float32 weights (what our trainer computes with),
no gradient checkpointing, the whole step as one padded micro-batch, fused AdamW, no saving, no reports. Packing without
attention across rows needs flash attention there, which a CPU has not. The rows come as tokens and masks, so that both
sides train on the same ones.
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from bench.gate import Gate


class AtTheGate(TrainerCallback):
    """Arrives before each optimizer step; before the first and after the last with the loss on held-out rows."""

    def __init__(self, gate: Gate, held_out: list[dict]) -> None:
        self._gate, self._rows, self._values = gate, held_out, {}

    def on_log(self, args, state, control, logs=None, **_):
        self._values = {"loss": float(logs["loss"])} if logs and "loss" in logs else self._values

    def on_step_begin(self, args, state, control, model=None, **_):
        more = {"val/loss": self.loss(model)} if state.global_step == 0 else {}
        self._gate.arrive(state.global_step + 1, self._values | more)

    def on_train_end(self, args, state, control, model=None, **_):
        self._gate.arrive(state.global_step + 1, self._values | {"val/loss": self.loss(model)})

    @torch.no_grad()
    def loss(self, model) -> float:
        """The mean over all learnt tokens, row by row."""
        total = count = 0.0
        for row in self._rows:
            ids, mask = torch.tensor([row["input_ids"]]), torch.tensor(row["completion_mask"])[1:].bool()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids).logits[0, :-1].float()
            found = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")[mask]
            total, count = total + float(found.sum()), count + len(found)
        return total / count


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    settings = SFTConfig(
        output_dir=work["directory"],
        use_cpu=True,
        bf16=work["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": "float32", "attn_implementation": work["attention"]},
        max_steps=work["steps"],
        per_device_train_batch_size=work["rows_per_step"],
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.999,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        max_length=None,
        completion_only_loss=True,  # else the mask of the rows has no effect
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    gate = Gate.connect(int(os.environ.get("RANK", "0")))
    trainer = SFTTrainer(
        model=work["model"],
        args=settings,
        train_dataset=Dataset.from_list(work["rows"]),
        callbacks=[AtTheGate(gate, work["eval"])],
    )
    trainer._get_train_sampler = lambda *_: None  # in the order of the file
    trainer.train()


if __name__ == "__main__":
    main()
