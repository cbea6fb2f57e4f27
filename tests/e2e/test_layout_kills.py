"""kill -9 of a rank under each layout: the same line typed again ends bitwise where an undisturbed run ends."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.e2e.runs import Running, Toy
from tests.e2e.test_kills import POINTS, SETTINGS, assert_undisturbed, strike
from tests.e2e.test_layouts import TOYS
from tests.engines import needs_sglang

LAYOUTS = {
    "cp": ("smollm2", 2, "train.cp=2"),
    "pp": ("qwen2", 2, "train.pp=2"),
    "pp-vpp": ("four_layers", 2, "train.pp=2 train.vpp=2"),
    "tp": ("smollm2", 3, "train.tp=3"),
    "ep": ("qwen3_moe", 2, "train.ep=2 policy.router_aux_coef=0.01"),
    "pp-tp": ("qwen2", 4, "train.pp=2 train.tp=2"),
    "lora": ("smollm2", 2, "policy.lora.rank=4 policy.lora.dropout=0.1 algorithm.kl_coef=0.1"),
    "zero1": ("smollm2", 2, "train=deepspeed train.stage=1"),
    "zero3-lora": ("smollm2", 2, "train=deepspeed policy.lora.rank=4 policy.lora.dropout=0.1 algorithm.kl_coef=0.1"),
    "zero3": ("smollm2", 2, "train=deepspeed train.offload_optimizer=true"),
    "megatron-tp": ("qwen2", 2, "train=megatron train.tp=2"),
    "megatron-pp": ("qwen2", 2, "train=megatron train.pp=2"),
    "megatron-ep": ("qwen3_moe", 2, "train=megatron train.ep=2"),
    "megatron-lora": ("qwen2", 2, "train=megatron train.tp=2 policy.lora.rank=4 algorithm.kl_coef=0.1"),
    "sglang": ("four_layers", 2, "engine=sglang engine.tp=2"),
    "hybrid": ("hybrid", 2, ""),
    "hybrid-lora": ("hybrid", 2, "policy.lora.rank=4"),
    "overlap": ("smollm2", 2, "checkpoint.overlap=true"),
    "zero3-overlap": ("smollm2", 2, "train=deepspeed checkpoint.overlap=true"),
    "megatron-pp-overlap": ("qwen2", 2, "train=megatron train.pp=2 checkpoint.overlap=true"),
}
"""Model, ranks, settings."""
STRUCK = ("publish", "update", "save")
CASES = [(layout, phase) for layout in LAYOUTS for phase in STRUCK]
QUICK = {("pp", "save"), ("lora", "save"), ("hybrid", "update")}


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Callable[[str], Toy]:
    @cache
    def made(model: str) -> Toy:
        kind, sizes = TOYS["native"][model]
        return Toy(tmp_path_factory.mktemp(model), kind, intermediate_size=96, **sizes)

    return made


@pytest.fixture(scope="module")
def straight(toys) -> Callable[[str], Running]:
    """The undisturbed run of a layout."""

    @cache
    def made(layout: str) -> Running:
        model, ranks, settings = LAYOUTS[layout]
        return toys(model).run(*SETTINGS, *settings.split(), ranks=ranks, name=f"straight-{layout}")

    return made


@pytest.mark.parametrize(
    ("layout", "phase"),
    [
        pytest.param(
            *case,
            marks=() if case in QUICK else (pytest.mark.slow, *([needs_sglang] if "sglang" in case[0] else [])),
            id="-".join(case),
        )
        for case in CASES
    ],
)
def test_a_rank_killed_in_a_layout_is_made_good_by_the_same_line(
    toys, straight, layout: str, phase: str, record_property: Callable
) -> None:
    model, ranks, settings = LAYOUTS[layout]
    # the first rank once a layout, without an agent; else the last one
    victim = 0 if phase == "save" else ranks - 1
    stage = f"stage {victim * 2 // ranks}: " if "pp" in layout else ""
    point = POINTS[phase].replace("collective ", f"collective {stage}")
    point = point.replace("backward of ", "backward of chunk 1 of ") if "vpp" in layout else point
    point = point.replace("backward", "forward") if "megatron" in layout else point  # a schedule of its own
    name = f"struck-{layout}-{phase}"
    run = strike(toys(model), name, f"rank-{victim}", point, *settings.split(), ranks=ranks)
    assert run.wait(60) != 0
    assert not run.outlived(2.0), "a process outlived its run"
    record_property("said", run.text().strip().splitlines()[-1])
    again = toys(model).run(*SETTINGS, *settings.split(), ranks=ranks, name=name)
    assert_undisturbed(again, straight(layout))
