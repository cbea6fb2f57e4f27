"""What TRL's own trainers make of random logprobs: frozen for `test_preference.py`. Runs in TRL's venv.

    .venv-trl/bin/python -W ignore tests/unit/algo/trl_preference.py > tests/unit/algo/trl_preference.json

Its losses are computed inside of its trainers: each is called with a model that gives the logprobs.
"""

import json
from collections import defaultdict
from types import SimpleNamespace

import torch
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer

LENGTHS = [(3, 5), (1, 4), (6, 2), (4, 4), (5, 1), (2, 7)]
LONGEST = 1 + max(map(max, LENGTHS))


def accelerator() -> SimpleNamespace:
    same = {name: (lambda value: value) for name in ("gather", "gather_for_metrics")}
    return SimpleNamespace(device=torch.device("cpu"), **same)


def rows(generator: torch.Generator, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the tokens of answers after a prompt of one token, and the mask of the whole."""
    mask = torch.tensor([[0] + [1] * n + [0] * (LONGEST - 1 - n) for n in lengths])
    return -3 * torch.rand(len(lengths), LONGEST - 1, generator=generator) * mask[:, 1:], mask


def model_of(*answers: torch.Tensor):
    """Gives one set of logprobs after the other."""
    given = iter(answers)

    def model(**_) -> SimpleNamespace:
        logprobs = next(given)
        zeros = torch.zeros_like(logprobs)
        return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    return model


def trainer(**settings) -> SimpleNamespace:
    common = {
        "accelerator": accelerator(), "model": torch.nn.Linear(1, 1), "aux_loss_enabled": False, "ld_alpha": None,
        "precompute_ref_logps": True, "use_weighting": False, "f_divergence_type": "reverse_kl", "_tp_size": 1,
        "_metrics": defaultdict(lambda: defaultdict(list)), "_total_train_tokens": 0, "alpha": 0.0,
    }  # fmt: skip
    return SimpleNamespace(**common | settings)


def dpo(name: str, beta: float, policy, mask, reference) -> dict:
    """Loss of each pair, and the metrics of all."""
    losses, count = [], len(LENGTHS)
    for chosen in [[number] for number in range(count)] + [list(range(count))]:
        own = trainer(beta=beta, loss_types=[name], loss_weights=[1.0], label_smoothing=0.0)
        both = chosen + [number + count for number in chosen]
        inputs = {
            "input_ids": mask[both], "attention_mask": mask[both], "completion_mask": mask[both],
            "ref_chosen_logps": reference[both].sum(1)[: len(chosen)],
            "ref_rejected_logps": reference[both].sum(1)[len(chosen) :],
        }  # fmt: skip
        losses.append(float(DPOTrainer._compute_loss(own, model_of(policy[both]), inputs, False)))
    metrics = {key: values[0] for key, values in own._metrics["train"].items() if key.startswith(("rewards", "logps"))}
    return {"losses": losses[:-1], "mean": losses[-1], "metrics": metrics}


def cpo(name: str, beta: float, chosen, rejected, **settings) -> list[float]:
    own = trainer(beta=beta, loss_type=name, **settings)
    return CPOTrainer.cpo_loss(own, chosen, rejected)[0].tolist()


def kto(policy, mask, reference, others, ref_others, labels) -> dict:
    own = trainer(beta=0.1, loss_type="kto", calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.2)
    own._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(own, model, batch)
    inputs = {
        "input_ids": mask, "attention_mask": mask, "completion_mask": mask, "label": labels,
        "ref_logps": reference.sum(1), "ref_KL_logps": ref_others.sum(1),
        "KL_input_ids": mask, "KL_attention_mask": mask, "KL_completion_mask": mask,
    }  # fmt: skip
    loss = float(KTOTrainer._compute_loss(own, model_of(others, policy), inputs, False))
    metrics = {key: values[0] for key, values in own._metrics["train"].items() if key in ("kl", "rewards/margins")}
    return {"mean": loss, "metrics": metrics}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [chosen for chosen, _ in LENGTHS] + [rejected for _, rejected in LENGTHS]
    policy, mask = rows(generator, lengths)
    reference, _ = rows(generator, lengths)
    others, ref_others = (rows(generator, lengths)[0] for _ in range(2))
    count, sums, counts = len(LENGTHS), policy.sum(1), mask.sum(1)
    ratios, means = sums - reference.sum(1), sums / counts
    labels = torch.tensor([1] * count + [0] * count)
    found = {
        "lengths": lengths, "policy": sums.tolist(), "reference": reference.sum(1).tolist(),
        "others": others.sum(1).tolist(), "ref_others": ref_others.sum(1).tolist(),
        "dpo": dpo("sigmoid", 0.1, policy, mask, reference), "ipo": dpo("ipo", 0.2, policy, mask, reference),
        "hinge": dpo("hinge", 0.3, policy, mask, reference),
        "dpo length_normalised": dpo("sigmoid_norm", 2.0, policy, mask, reference),
        "dpo label_smoothing": cpo("sigmoid", 0.1, ratios[:count], ratios[count:], label_smoothing=0.2),
        "simpo": cpo("simpo", 2.0, means[:count], means[count:], label_smoothing=0.1, simpo_gamma=0.5),
        "kto": kto(policy, mask, reference, others, ref_others, labels),
        "kto above": kto(policy, mask, reference, ref_others + 1, others, labels),
    }  # fmt: skip
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
