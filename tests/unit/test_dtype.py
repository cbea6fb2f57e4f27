"""`policy.dtype=auto`: which dtype a CPU gets, and that all ranks get the same."""

from types import SimpleNamespace

import pytest
import torch

from spmd_rl.config.sections.models import PolicyConfig
from spmd_rl.distributed import agree_on_dtype
from spmd_rl.distributed.dtype import choose_cpu_dtype, choose_dtype, cpu_flags

X86 = "processor\t: 0\nflags\t\t: fpu avx512f {}\nbugs\t\t: spectre\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n"


@pytest.mark.parametrize(
    ("cpuinfo", "max_isa", "dtype", "words"),
    [
        (X86.format("avx512_bf16"), "", "bfloat16", "this CPU supports it (avx512_bf16)"),
        (X86.format("avx512_bf16 amx_bf16"), "DEFAULT", "bfloat16", "this CPU supports it (amx_bf16)"),
        (X86.format("avx512_bf16"), "AVX512_CORE_BF16", "bfloat16", "this CPU supports it (avx512_bf16)"),
        (X86.format("avx512_vnni"), "", "float32", "this CPU ("),
        (X86.format("avx512_bf16"), "AVX512_CORE_VNNI", "float32", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI excludes"),
        (ARM, "", "bfloat16", "this CPU supports it (bf16)"),
        ("", "", "float32", "this CPU ("),
    ],
)
def test_the_dtype_of_a_cpu(cpuinfo, max_isa, dtype, words):
    found, reason = choose_cpu_dtype(cpu_flags(cpuinfo), max_isa)
    assert found == dtype and reason.startswith(words)


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_device_is_asked_what_it_does_itself(monkeypatch, fast, dtype):
    module = SimpleNamespace(is_bf16_supported=lambda including_emulation: including_emulation or fast)
    monkeypatch.setattr("torch.get_device_module", lambda device: module)
    assert choose_dtype(torch.device("cuda", 0))[0] == dtype
    monkeypatch.setattr("torch.get_device_module", lambda device: SimpleNamespace())
    assert choose_dtype(torch.device("cuda", 0))[0] == "float32"


@pytest.mark.parametrize(
    ("choices", "dtype", "line"),
    [
        (["bfloat16", "bfloat16"], "bfloat16", "policy.dtype=auto: bfloat16, because of bfloat16"),
        (["float32", "float32"], "float32", "policy.dtype=auto: float32, because of float32"),
        (
            ["bfloat16", "float32"],
            "float32",
            "policy.dtype=auto: float32, because on ranks [1] of float32, and all ranks compute in one dtype",
        ),
    ],
)
def test_all_ranks_get_one_dtype(choices, dtype, line, capsys):
    for rank in (0, 1):
        found = [(choice, f"of {choice}") for choice in choices]
        world = SimpleNamespace(rank=rank, size=2, device=torch.device("cpu"), gather=lambda name, mine: found)
        policy = PolicyConfig()
        agree_on_dtype(world, policy)
        assert policy.dtype == dtype
    assert capsys.readouterr().err == line + "\n"


def test_a_dtype_that_is_given_stays_and_meets_nobody():
    policy = PolicyConfig(dtype="bfloat16")
    agree_on_dtype(SimpleNamespace(), policy)
    assert policy.dtype == "bfloat16"
