"""The numbers of TRL 1.16.0 that `test_trl_losses.py` holds ours to, by running TRL's own `_compute_loss`.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0
    /tmp/trl/bin/python -m tests.unit.algo.trl_losses

TRL's method is called on a stand-in for its trainer that returns given logprobs. Each line: a name, the loss, and its
gradient at the tokens, row by row without padding.
"""

from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import Mock

import torch

NEW = [[-0.5, -1.2, -2.0, -0.1], [-0.7, -1.9], [-3.0, -0.4, -1.1]]
OLD = [[-0.6, -1.0, -2.6, -0.1], [-1.1, -1.6], [-2.7, -0.9, -1.2]]
ENTROPY = [[0.5, 1.5, 2.5, 0.1], [1.0, 2.0], [2.2, 0.3, 0.9]]
ADVANTAGES = [0.8, -1.1, -0.4]
"""Three answers of four, two and three tokens."""
MAX_LENGTH = 16
SETTINGS: dict[str, dict] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "two-sided": {"loss_type": "grpo", "delta": 1.4},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "sapo": {"loss_type": "sapo"},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.01},
}


def padded(rows: list[list[float]]) -> torch.Tensor:
    """Float64 [rows, longest], 0 beyond a row."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def trainer(
    logprobs: torch.Tensor,
    *,
    loss_type: str,
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    delta: float | None = None,
    entropy_coef: float = 0.0,
) -> SimpleNamespace:
    """What `_compute_loss` reads of its trainer: one process, no accumulation, no KL, no correction."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, padded(ENTROPY), None),
        _metrics=defaultdict(lambda: defaultdict(list)), _entropy_bonus_enabled=entropy_coef != 0,
        args=SimpleNamespace(
            delta=delta, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1,
            use_bias_correction_kl=False,
        ),
        loss_type=loss_type, importance_sampling_level=importance_sampling_level,
        epsilon_low=epsilon_low, epsilon_high=epsilon_high, entropy_coef=entropy_coef,
        accelerator=accelerator, model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH, beta=0.0, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        use_vllm=False, vllm_importance_sampling_correction=False, use_adaptive_entropy=False,
        aux_loss_enabled=False,
    )  # fmt: skip


def main() -> None:
    """Print one line per setting."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask = padded([[1.0] * len(row) for row in NEW])
    for name, settings in SETTINGS.items():
        logprobs = padded(NEW).requires_grad_()
        inputs = {
            "prompt_ids": torch.ones(3, 1, dtype=torch.int64), "prompt_mask": torch.ones(3, 1, dtype=torch.int64),
            "completion_ids": mask.long(), "completion_mask": mask, "old_per_token_logps": padded(OLD),
            "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64), "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        loss = GRPOTrainer._compute_loss(trainer(logprobs, **settings), Mock(), inputs)
        loss.backward()
        gradient = [round(g, 12) for g in logprobs.grad[mask.bool()].tolist()]
        print(f'    "{name}": ({loss.item():.12f}, {gradient}),')


if __name__ == "__main__":
    main()
