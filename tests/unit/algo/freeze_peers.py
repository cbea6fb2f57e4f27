"""Writes `peers.json`: what other libraries' own functions, unchanged, make of the inputs of `peers.py`.

    python -m tests.unit.algo.freeze_peers FOLDER > tests/unit/algo/peers.json

FOLDER holds clones of verl and NeMo-RL at the revisions of `PEERS`, as `verl` and `nemo`; TRL is installed. What
their modules import besides, and these functions do not use, is replaced by stand-ins.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

from tests.unit.algo import peers
from tests.unit.algo.peers import MEAN, NUM_INPUTS, SEQUENCE, WIDTH, Found, Input
from tests.unit.algo.trl_losses import trainer

CORE, LOSSES = "verl/trainer/ppo/core_algos.py", "nemo_rl/algorithms/loss/loss_functions.py"
VERL = "verl-project/verl 1dda039b9c6311889a9c9a26040677e1254814f9 verl/trainer/ppo/core_algos.py: "
PEERS: dict[str, str] = {}
"""Of each column: repository, revision, file and function."""


class Settings(SimpleNamespace):
    """A library's settings, also by name."""

    def get(self, name: str, default: Any = None) -> Any:
        """Read one as of a mapping."""
        return getattr(self, name, default)


def loaded(path: Path, **stand_ins: Any) -> ModuleType:
    """Load the module of a file, with stand-ins for modules."""
    for name, module in stand_ins.items():
        sys.modules[name.replace("__", ".")] = module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_gradient(given: Input, function: Callable[[Tensor], Tensor], start: Tensor) -> Found:
    """Return the value of a function of padded rows, and its gradient at the tokens."""
    leaf = start.clone().requires_grad_()
    value = function(leaf)
    return value, given.joined(torch.autograd.grad(value.sum(), leaf)[0])


def verl(root: Path) -> dict[str, Callable[[Input], Found]]:
    """Return its functions by column."""
    names = ("tensordict", "verl", "verl__utils", "verl__utils__device", "verl__trainer", "verl__workers")
    mocked = {name: MagicMock() for name in names}
    functional = loaded(root / "verl/utils/torch_functional.py", **mocked)
    mocked["verl"].utils, mocked["verl__utils"].torch_functional = mocked["verl__utils"], functional
    actor = SimpleNamespace(ActorConfig=Settings)
    algorithm = {"verl__utils__torch_functional": functional, "verl__workers__config": actor}
    config = SimpleNamespace(AlgoConfig=type("AlgoConfig", (), {}))
    more = {"verl__utils__import_utils": SimpleNamespace(deprecated=lambda *_: lambda f: f)}
    core = loaded(root / CORE, **algorithm, **more, verl__trainer__config=config)
    found: dict[str, Callable[[Input], Found]] = {}

    def add(column: str, name: str, run: Callable[[Any, Input], Found]) -> None:
        function = getattr(core, name)
        PEERS[f"verl {column}"] = VERL + name
        found[f"verl {column}"] = lambda given: run(function, given)

    def policy(column: str, name: str, aggregation: str, **settings: Any) -> None:
        cfg = Settings(**{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None} | settings)
        cfg.global_batch_info = {"loss_scale_factor": WIDTH} if aggregation.endswith("norm") else {}
        cfg.policy_loss = Settings()

        def run(function: Any, given: Input) -> Found:
            def value(new: Tensor) -> Tensor:
                return function(given.old, new, given.advantages, given.mask, aggregation, cfg)[0]

            return with_gradient(given, value, given.new)

        add(column, f"compute_policy_loss_{name}", run)

    def band(low: float, high: float) -> dict[str, float]:
        return {"clip_ratio_low": low, "clip_ratio_high": high}

    for aggregation in (MEAN, SEQUENCE, "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        policy(f"ppo {aggregation}", "vanilla", aggregation, **band(0.2, 0.28), clip_ratio_c=3.0)
    policy("gspo", "gspo", SEQUENCE, **band(3e-2, 4e-2))
    policy("gmpo", "geo_mean", MEAN, **band(0.4, 0.4))
    policy("cispo", "cispo", MEAN, **band(1.0, 0.3))
    policy("sapo", "sapo", SEQUENCE, tau_pos=1.0, tau_neg=1.05)
    policy("dppo_tv", "dppo_tv", MEAN, **band(0.15, 0.15), clip_ratio_c=20.0)
    policy("dppo_kl", "dppo_kl", MEAN, **band(0.05, 0.05), clip_ratio_c=20.0)
    policy("gpg", "gpg", MEAN)
    for column, name in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")):

        def estimate(function: Any, given: Input, name: str = name) -> Found:
            value, gradient = with_gradient(given, lambda new: function(new, given.old, name), given.new)
            return given.joined(value), gradient

        add(column, "kl_penalty_forward", estimate)

    def critic(function: Any, given: Input) -> Found:
        def value(predicted: Tensor) -> Tensor:
            return function(predicted, given.advantages, given.old, given.mask, 0.5, MEAN)[0]

        return with_gradient(given, value, given.values)

    add("value loss", "compute_value_loss", critic)

    def at_end(given: Input) -> Tensor:
        return torch.zeros_like(given.mask).scatter(1, given.lengths[:, None] - 1, given.scores[:, None])

    def gae(function: Any, given: Input) -> Found:
        core.verl_F = SimpleNamespace(masked_whiten=lambda values, mask: values)  # ours whitens apart
        found = function(at_end(given), given.values, given.mask, torch.tensor(0.9), torch.tensor(0.95))
        core.verl_F = functional
        return tuple(map(given.joined, found))

    add("gae", "compute_gae_advantage_return", gae)

    def answers(column: str, name: str, **keys: Any) -> None:
        def run(function: Any, given: Input) -> Found:
            index = np.array([str(group) for group in given.groups.tolist()])
            found = function(token_level_rewards=at_end(given), response_mask=given.mask, index=index, **keys)[0]
            return given.joined(found * given.mask), torch.zeros(1)

        add(column, f"compute_{name}_outcome_advantage", run)

    answers("grpo", "grpo")
    answers("dr_grpo", "grpo", norm_adv_by_std_in_grpo=False)
    answers("rloo", "rloo")
    answers("opo", "opo")
    answers("reinforce_pp_baseline", "reinforce_plus_plus_baseline")
    return found


TRL: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "two-sided": {"loss_type": "grpo", "delta": 1.4},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "sapo": {"loss_type": "sapo"},
}


def trl() -> dict[str, Callable[[Input], Found]]:
    """Return its functions by column."""
    import trl
    from trl.trainer.grpo_trainer import GRPOTrainer

    PEERS.update({f"TRL {name}": f"trl {trl.__version__} GRPOTrainer._compute_loss" for name in TRL})

    def run(given: Input, settings: dict[str, Any]) -> Found:
        ones = torch.ones(len(given.mask), 1, dtype=torch.int64)
        inputs = {"prompt_ids": ones, "prompt_mask": ones, "completion_ids": given.mask.long()}
        inputs |= {"completion_mask": given.mask, "old_per_token_logps": given.old}
        inputs |= {"advantages": given.advantages[:, 0], "num_items_in_batch": given.mask.sum()}

        def value(new: Tensor) -> Tensor:
            stand_in = trainer(new, **settings)
            stand_in._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
            return GRPOTrainer._compute_loss(stand_in, MagicMock(), inputs)

        return with_gradient(given, value, given.new)

    return {f"TRL {name}": lambda given, own=settings: run(given, own) for name, settings in TRL.items()}


def nemo(root: Path) -> dict[str, Callable[[Input], Found]]:
    """Return its functions by column."""
    parts = ("", ".algorithms", ".algorithms.loss", ".algorithms.utils", ".algorithms.x_token", ".distributed")
    parts += (".algorithms.x_token.loss_utils", ".distributed.batched_data_dict", ".distributed.model_utils")
    parts += (".models", ".models.dtensor", ".models.dtensor.parallelize")
    names = [f"nemo_rl{part}" for part in parts]
    mocked = {name.replace(".", "__"): MagicMock() for name in names}
    sys.modules["nemo_rl.algorithms.utils"] = utils = mocked["nemo_rl__algorithms__utils"]
    for name in ("masked_mean", "calculate_kl"):
        setattr(utils, name, _function(root / "nemo_rl/algorithms/utils.py", name))
    interfaces = loaded(root / "nemo_rl/algorithms/loss/interfaces.py", **mocked)
    module = loaded(root / LOSSES, nemo_rl__algorithms__loss__interfaces=interfaces)
    settings = {"positive_example_nll_weight": 0.1, "token_level_loss": True, "disable_ppo_ratio": True}
    settings["reference_policy_kl_penalty"] = 0.0
    column = "NeMo positive examples"
    PEERS[column] = f"NVIDIA-NeMo/RL 7ea279abfbeb698b092856d0dab61e7cf39bc909 {LOSSES}: ClippedPGLossFn"

    def run(given: Input) -> Found:
        first = torch.zeros(len(given.mask), 1, dtype=torch.float64)  # its columns begin before the first target
        data = {"token_mask": torch.cat([first, given.mask], 1)}
        for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
            data[name] = torch.cat([first, given.old], 1)
        data |= {"advantages": torch.zeros_like(data["token_mask"]), "rewards": given.scores}
        data |= {"sample_mask": torch.ones(len(given.mask), dtype=torch.float64)}
        data["input_ids"] = torch.zeros_like(data["token_mask"])
        loss = module.ClippedPGLossFn(module.ClippedPGLossConfig(**settings))
        return with_gradient(
            given, lambda new: loss(new, data, given.mask.sum().clone(), given.mask.sum().clone())[0], given.new
        )

    return {column: run}


def _function(path: Path, name: str) -> Any:
    """Load one function of a module whose other parts are not needed."""
    import ast

    source = path.read_text()
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    names: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "Optional": MagicMock(), "Union": MagicMock()}
    exec("from __future__ import annotations\n" + ast.get_source_segment(source, node), names)
    return names[name]


def main() -> None:
    root = Path(sys.argv[1])
    functions = verl(root / "verl") | trl() | nemo(root / "nemo")
    frozen = {
        name: [peers.digest(*run(peers.made(number))) for number in range(NUM_INPUTS)]
        for name, run in functions.items()
    }
    lines = [f' "{name}": {{"source": {json.dumps(PEERS[name])},\n  "values": {frozen[name]}}}' for name in frozen]
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
