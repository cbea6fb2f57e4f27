"""What `train=deepspeed` leans on in DeepSpeed beyond its documentation: a version without it must not be taken."""

import inspect
import logging
from importlib import import_module

import pytest
import torch

from spmd_rl.config.packages import installed, requirements
from spmd_rl.train.deepspeed.model import GatedAdamW
from spmd_rl.train.deepspeed.partition import boxes

NAMES = {
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params": ["self"],
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer.update_lp_params": ["self"],
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_local_fp32_param": [
        "self",
        "param",
        "optim_state_key",
    ],
    "deepspeed.utils.tensor_fragment:tensor_fragment.get_lp_grad_fragment": ["self", "index_in_param_group"],
    "deepspeed.utils.tensor_fragment:tensor_fragment.get_hp_fragment_address": ["self"],
    "deepspeed.utils:safe_get_local_grad": ["param"],
    "deepspeed.utils:safe_get_local_fp32_param": ["param"],
    "deepspeed.utils:safe_get_local_optimizer_state": ["param", "optim_state_key"],
    "deepspeed.utils:safe_set_local_fp32_param": ["param", "value"],
    "deepspeed.utils:safe_set_local_optimizer_state": ["param", "value", "optim_state_key"],
    "deepspeed.runtime.engine:DeepSpeedEngine.set_gradient_accumulation_boundary": ["self", "is_boundary"],
}
SAID = {
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": ["._hp_mapping", "link_hp_params("],
    "deepspeed.utils.tensor_fragment": [
        "._hp_mapping",
        "._index_in_param_group",
        "lp_fragment_address: fragment_address",
        "start: int",
        "numel: int",
    ],
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": [
        "self.fp32_partitioned_groups_flat",
        "dist.barrier()",
    ],
    "deepspeed.runtime.zero.partitioned_param_coordinator": ["assert_ints_same_as_other_ranks("],
    "deepspeed.runtime.zero.partition_parameters": ["param.ds_tensor", "param.ds_numel", "param.ds_id"],
    "deepspeed.comm.torch:build_shm_op": ["__compatible_ops__.get(builder.NAME, False)"],
    "deepspeed.utils.groups": ["mpu.get_data_parallel_group()", "mpu.get_data_parallel_world_size()"],
}

needs_deepspeed = pytest.mark.skipif(installed("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.fixture(autouse=True)
def as_a_rank_has_it(monkeypatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def found(place: str):
    module, _, names = place.partition(":")
    at = import_module(module)
    for name in names.split(".") if names else ():
        at = getattr(at, name)
    return at


@needs_deepspeed
def test_names_and_parameters() -> None:
    for place, wanted in NAMES.items():
        assert list(inspect.signature(found(place)).parameters)[: len(wanted)] == wanted, place


@needs_deepspeed
def test_private_names_are_used_as_here() -> None:
    for place, texts in SAID.items():
        source = inspect.getsource(found(place))
        assert [text for text in texts if text not in source] == [], place
    assert logging.getLogger("DeepSpeed") is found("deepspeed.utils:logger")


@needs_deepspeed
def test_the_tested_version_is_in_the_range_of_the_extra() -> None:
    (need,) = (need for need in requirements() if need.name == "deepspeed")
    assert need.specifier.contains(installed("deepspeed")) and not need.specifier.contains("0.20.0")


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (4, 3, 5), (2, 1, 3, 2)])
def test_a_flat_range_is_a_few_boxes_in_order(shape) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for begin in range(numbers.numel() + 1):
        for end in range(begin, numbers.numel() + 1):
            regions = list(boxes(shape, begin, end))
            held = [number for region in regions for number in numbers[region].flatten().tolist()]
            assert held == list(range(begin, end)) and len(regions) <= max(1, 2 * len(shape) - 1)


def test_a_closed_optimizer_changes_nothing_and_an_open_one_clips() -> None:
    from spmd_rl.config.schema import PolicyConfig

    mine, plain = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    gated, adamw = (
        GatedAdamW([mine], PolicyConfig(lr=0.5)),
        torch.optim.AdamW([plain], lr=0.1, weight_decay=0.0, fused=True),
    )
    gated.begin([mine])
    mine.grad, plain.grad = torch.full((5,), torch.nan), torch.arange(5.0) / 4
    gated.open(0.1, None)
    gated.step()
    assert torch.equal(mine, torch.ones(5)) and not any(kept.any() for kept in gated.state[mine].values())
    mine.grad = torch.arange(5.0)
    gated.open(0.1, 0.25)
    gated.step()
    adamw.step()
    assert torch.equal(mine, plain) and not torch.equal(mine, torch.ones(5))
