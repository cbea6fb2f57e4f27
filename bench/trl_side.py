"""TRL's GRPOTrainer on the work that a JSON file describes, held at the gate before each step. Runs in TRL's own venv.

    python -m bench.trl_side WORK.json
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m bench.trl_side WORK.json

As fast as its own settings make it on a CPU: bfloat16 autocast over float32 weights (what our trainer computes with),
eager attention (an eighth less CPU time here than SDPA), no gradient checkpointing, no reference (`beta=0`), one
iteration (so that it skips the pass for old logprobs), one micro-batch for the whole step (smaller ones cost more),
fused AdamW, KV-cached generation, no saving, no reports. Its continuous batching costs more than twice as much on a
CPU. Prompts come in the order of our tickets; scores from the same rewarder, called in process. Left out: its vLLM
mode, which takes vLLM up to 0.31.
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.gate import Gate
from spmd_rl.base.targets import build_target
from spmd_rl.types import AnswerInfo, Message, Prompt


class AtTheGate(TrainerCallback):
    """Arrives before each optimizer step, with what the step before it logged."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._values = gate, {}

    def on_log(self, args, state, control, logs=None, **_):
        self._values = {key: value for key, value in (logs or {}).items() if isinstance(value, int | float)}

    def on_step_begin(self, args, state, control, model=None, **_):
        while (order := self._gate.arrive(state.global_step + 1, self._values)).do == "export":
            if state.is_world_process_zero:
                save(model, order.path)

    def on_train_end(self, args, state, control, **_):
        self._gate.arrive(state.global_step + 1, self._values)


def save(model: torch.nn.Module, path: str) -> None:
    """Every weight once, in bfloat16, under its Hugging Face name."""
    inner = getattr(model, "module", model)
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in inner.named_parameters()}
    save_file(weights, path)


def rewarder(work: dict) -> object:
    """TRL's reward function over our rewarder. 0 for what has no score, as a TRL user would write it."""
    judge = build_target("reward", work["reward"]["target"], work["reward"]["args"])
    prompts = [
        Prompt(
            row["id"],
            tuple(Message(**m) for m in row["messages"]),
            row["domain"],
            row["ground_truth"],
            row["extra"],
        )
        for row in work["rows"]
    ]

    def score(completions, completion_ids, row, **_) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        infos = [AnswerInfo(len(ids), "stop") for ids in completion_ids]
        return [judge.score(prompts[i], text, info).score for i, text, info in zip(row, texts, infos, strict=True)]

    return score


def config(work: dict, ranks: int) -> GRPOConfig:
    """The settings of our step in TRL's words."""
    samples = work["prompts_per_step"] * work["answers_per_prompt"]
    on_cpu = not torch.accelerator.is_available()
    settings = {
        "output_dir": work["directory"],
        "use_cpu": on_cpu,
        "bf16": work["dtype"] == "bfloat16",
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager" if on_cpu else "sdpa"},
        "seed": work["seed"],
        "max_steps": work["steps"],
        "per_device_train_batch_size": samples // ranks,
        "num_generations": work["answers_per_prompt"],
        "max_completion_length": work["max_new_tokens"],
        "temperature": work["temperature"],
        "shuffle_dataset": False,
        "beta": 0.0,
        "num_iterations": 1,
        "epsilon": work["clip"],
        "loss_type": "dapo",  # the mean over all tokens of the batch: our `token-mean`
        "scale_rewards": "group",
        "learning_rate": work["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta1": work["betas"][0],
        "adam_beta2": work["betas"][1],
        "weight_decay": work["weight_decay"],
        "max_grad_norm": work["max_grad_norm"],
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**settings, **work["trl"]})


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = GRPOTrainer(
        model=work["model"],
        reward_funcs=rewarder(work),
        args=config(work, ranks),
        train_dataset=Dataset.from_list([{"prompt": row["messages"], "row": i} for i, row in enumerate(work["rows"])]),
        callbacks=[AtTheGate(Gate.connect(int(os.environ.get("RANK", "0"))))],
    )
    trainer.train()


if __name__ == "__main__":
    main()
