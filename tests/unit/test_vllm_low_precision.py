"""Matrices that vLLM holds in INT8 and FP8: published over a running engine, they equal those of a checkpoint."""

import json
from array import array
from contextlib import closing

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl import weights
from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.distributed import solo
from spmd_rl.engine.replicated import replica_group
from spmd_rl.model.low_precision import SCALE, W8A8, by_rows, shapes_by_rows
from spmd_rl.types import Request
from spmd_rl.weights import probe
from tests.engines import VLLM_SIZES, needs_vllm, one_rank, vllm_engine
from tests.models import tiny
from tests.unit.test_publish import Policy

pytestmark = needs_vllm
PROMPTS = (array("i", range(24, 64)), array("i", range(100, 107)))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("qwen2", tmp_path_factory.mktemp("model"), **VLLM_SIZES)


@pytest.fixture
def onednn(monkeypatch):
    """Kernels of oneDNN that sum INT8 exactly: stubs where this CPU's do not, for want of VNNI."""
    from vllm import _custom_ops as ops

    from spmd_rl.engine.vllm import low_precision

    try:
        low_precision.check_int8()
    except UserError:
        monkeypatch.setattr(ops, "create_onednn_scaled_mm", Packed)
        monkeypatch.setattr(ops, "onednn_scaled_mm", exact_sums)


@pytest.fixture(params=["onednn", "amx"])
def kernels(request, monkeypatch, onednn):
    """One kind of kernels that vLLM chooses on a CPU: oneDNN's and torch's, or those for AMX.

    On a CPU without AMX the latter are stubs with their layouts and their dtypes.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    amx = request.param == "amx"
    fits = (lambda n, k, dtype: k % 32 == 0 and n % 16 == 0) if amx else (lambda n, k, dtype: False)
    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", fits)
    fp8 = cpu.CPUFP8W8A8ScaledMMLinearKernel
    monkeypatch.setattr(fp8, "is_supported", classmethod(lambda *_: (amx, None if amx else "not in this test")))
    if amx and not torch.cpu._is_amx_tile_supported():
        monkeypatch.setattr(torch.ops._C, "convert_weight_packed", torch.clone, raising=False)
        monkeypatch.setattr(torch.ops._C, "int8_scaled_mm_with_quant", int8_of_amx, raising=False)
    if amx and not ops.cpu_has_amx_fp8():
        monkeypatch.setattr(torch.ops._C, "float8_linear_prepack_cpu", lambda *given: given, raising=False)
        monkeypatch.setattr(torch.ops._C, "fp8_scaled_mm_with_quant", fp8_of_amx, raising=False)


class Packed:
    """A matrix [K, N] with the factors of its columns, in the place of oneDNN's handle."""

    def __init__(self, weight, scales, dtype, dynamic, azp, size):
        self.weight, self.scales, self.n = weight.float(), scales, weight.size(1)


def exact_sums(packed, given, out, factors, azp, azp_adj, bias):
    sums = (given.float() @ packed.weight) * factors * packed.scales.t()
    out.copy_(sums if bias is None else sums + bias)


def int8_of_amx(given, weight, scales, bias, dtype, packed):
    assert given.dtype in (torch.bfloat16, torch.float16), "expect A to be bfloat16 or half"
    assert weight.dtype == torch.int8 and packed
    factors = given.float().abs().amax(1, keepdim=True).clamp_min(1e-7) / 127
    sums = ((given.float() / factors).round() @ weight.float().t()) * factors * scales.t()
    return (sums if bias is None else sums + bias).to(dtype)


def fp8_of_amx(given, given_scales, by_token, weight, scales, bias, dtype):
    assert given_scales is None and by_token and weight.dtype == torch.float8_e4m3fn
    factors = given.float().abs().amax(1, keepdim=True).clamp_min(1e-7) / 448
    values = (given.float() / factors).to(weight.dtype).float()
    sums = (values @ weight.float().t()) * factors * scales.t()
    return (sums if bias is None else sums + bias).to(dtype)


def move(policy: Policy, version: int) -> None:
    """Put the weights of a version into the policy: each other than those of all others."""
    noise = torch.Generator().manual_seed(version)
    for parameter in policy.model.parameters():
        drawn = torch.randn(parameter.shape, generator=noise) * 0.05
        parameter.data.mul_(1 + drawn.to(parameter.dtype))


def answers(engine, version: int):
    for index, prompt in enumerate(PROMPTS):
        engine.add(Request(f"{version}-{index}", prompt, 12, 1.0, seed=3, order=(0, index, 0)))
    found = []
    while engine.num_unfinished:
        found += [(c.id, c.token_ids.tolist(), c.logprobs.tolist()) for c in engine.step()]
    return sorted(found)


def from_disk(path, folder, policy: Policy, form: str, dtype: str, version: int):
    """What vLLM answers that is started from a checkpoint in 8 bits."""
    from spmd_rl.engine.vllm import start as starting
    from spmd_rl.engine.vllm.engine import VllmEngine
    from spmd_rl.engine.vllm.guest import hosted
    from spmd_rl.engine.vllm.low_precision import engine_args

    folder.mkdir()
    config = json.loads((path / "config.json").read_text()) | engine_args(form, {})["hf_overrides"]
    (folder / "config.json").write_text(json.dumps(config))
    given = {name: tensor.contiguous() for name, tensor in by_rows(policy.weights(), form)}
    save_file(given, folder / "model.safetensors", metadata={"format": "pt"})
    with one_rank() as world, hosted("cpu"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(starting.ALWAYS, "load_format", "auto")
        replica = replica_group(world, "vllm", 1)
        sizes = {"tp": 1, "max_running": 8, "kv_tokens": 2048, "local_rank": 0}
        llm = starting.start(folder, getattr(torch, dtype), world.device, replica=replica, **sizes)
        with closing(VllmEngine(llm, {})) as engine:
            engine.version = version
            return answers(engine, version)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", W8A8)
def test_what_is_published_is_what_a_checkpoint_holds_and_no_fault_passes(path, tmp_path, kernels, form, dtype) -> None:
    wanted, policy = {}, Policy(path, getattr(torch, dtype))
    for version in (1, 2):
        move(policy, version)
        wanted[version] = from_disk(path, tmp_path / str(version), policy, form, dtype, version)
    assert wanted[1] != wanted[2]
    policy = Policy(path, getattr(torch, dtype))
    with vllm_engine(path, dtype, quantization=form) as engine, solo() as world:
        publish = weights.build(policy, engine, world, quantization=form)
        for version in (1, 2):
            move(policy, version)
            found = publish(version)
            assert 1e-4 < found["publish/probe_abs_diff"] < probe.LIMITS[torch.bfloat16]
            assert answers(engine, version) == wanted[version], "tokens and logprobs, to the bit"
        whole = sum(tensor.nbytes for _, tensor in policy.weights())
        assert found["publish/bytes"] < (0.75 if dtype == "bfloat16" else 0.5) * whole
        stale = {name: tensor.clone() for name, tensor in by_rows(policy.weights(), form)}
        move(policy, 3)
        key, reload = "model.layers.1.self_attn.k_proj.weight", engine.llm.collective_rpc
        faults = {
            "its matrix of before": lambda name, tensor: stale[name] if name == key else tensor,
            "its factors of before": lambda name, tensor: stale[name] if name == key + SCALE else tensor,
            "all of before": lambda name, tensor: stale[name] if name.startswith(key) else tensor,
            "one number a step off": lambda name, tensor: off_by_one(tensor) if name == key else tensor,
        }
        for fault, change in faults.items():

            def broken(method, kwargs, change=change):
                given = ((name, change(name, tensor)) for name, tensor in kwargs["weights_iterator"])
                reload(method, kwargs={"weights_iterator": given})

            engine.llm.collective_rpc = broken
            with pytest.raises(RunFailed, match=f"version 3: the engine computes with another {key[:-7]} than it was"):
                publish(3)
                pytest.fail(f"a layer that has {fault} has passed")
        engine.llm.collective_rpc = reload
        publish(4)


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same, but for one number in the middle of the range, which is the next one."""
    at = ((tensor.float().abs() - 40).abs()).argmin()
    tensor.view(torch.int8).view(-1)[at] += 1
    return tensor


def test_a_packed_copy_of_before_ends_the_run(path, onednn, monkeypatch) -> None:
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", lambda n, k, dtype: False)
    with vllm_engine(path, "bfloat16", quantization="w8a8_int8") as engine, solo() as world:
        policy = Policy(path, torch.bfloat16)
        publish = weights.build(policy, engine, world, quantization="w8a8_int8")
        publish(0)
        kernel = engine.model.model.layers[1].mlp.down_proj.scheme.kernel
        kept, handler = kernel.process_weights_after_loading, kernel.dnnl_handler

        def stale(layer):
            kept(layer)
            kernel.dnnl_handler = handler

        kernel.process_weights_after_loading = stale
        move(policy, 1)
        with pytest.raises(RunFailed, match="computes with another model.layers.1.mlp.down_proj than it was given"):
            publish(1)
        kernel.process_weights_after_loading = kept
        publish(2)


def test_a_cpu_whose_sums_saturate_is_refused_by_name(path, monkeypatch) -> None:
    from vllm import _custom_ops as ops

    monkeypatch.setattr(ops, "create_onednn_scaled_mm", Packed)
    monkeypatch.setattr(ops, "onednn_scaled_mm", lambda packed, given, out, *_: out.fill_(2**15 * 64))
    with pytest.raises(UserError, match="^engine.quantization: w8a8_int8 gives wrong sums on this CPU"):
        with vllm_engine(path, "float32", quantization="w8a8_int8"):
            pass


@pytest.mark.parametrize("form", W8A8)
def test_each_row_has_its_own_factor_and_stacked_experts_are_refused(form: str) -> None:
    weight = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    name, norm = "model.layers.0.mlp.up_proj.weight", "model.layers.0.norm.weight"
    given = dict(by_rows(iter([(name, weight), (norm, weight[0]), ("lm_head.weight", weight)]), form))
    assert list(given) == [name, name + SCALE, norm, "lm_head.weight"]
    dtype, largest = W8A8[form]
    assert given[name].dtype == dtype
    assert given[name].float().abs().amax(1).tolist() == [largest, largest, 0, largest, largest]
    error = (given[name].float() * given[name + SCALE] - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) * (0.5 / 127 if dtype == torch.int8 else 2**-4)).all()
    shapes = {key: tensor.shape for key, tensor in given.items()}
    assert shapes_by_rows({key: shape for key, shape in shapes.items() if SCALE not in key}, form) == shapes
    with pytest.raises(UserError, match="not for a mixture; model.layers.0.mlp.experts.up_proj are stacked experts"):
        shapes_by_rows({"model.layers.0.mlp.experts.up_proj": torch.Size((4, 8, 8))}, form)
