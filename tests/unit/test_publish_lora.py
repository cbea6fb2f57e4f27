"""Adapters on the weight road: one that is dropped, stale, half scaled or another layer's ends the run by name."""

from array import array
from types import SimpleNamespace

import pytest
import torch

from spmd_rl import weights
from spmd_rl.base.errors import RunFailed
from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.distributed import Layout, solo
from spmd_rl.model.build import build_model
from spmd_rl.types import Request
from spmd_rl.weights.adapter_source import AdapterSource
from tests.engines import VLLM_SIZES, needs_sglang, needs_vllm, one_rank, sglang_engine, started_engine, vllm_engine
from tests.models import tiny
from tests.training import TEMPERATURE, fsdp2_policy, global_batch, loss

LORA = LoraConfig(rank=4, alpha=8.0)
SETTINGS = {"lr": 3e-2, "max_grad_norm": 10.0}


def learner(path, world, lora: LoraConfig = LORA):
    """A policy with adapters, not trained yet."""
    model = build_model(path, torch.float32, "cpu")
    settings, train = PolicyConfig(lora=lora, **SETTINGS), TrainConfig()
    return fsdp2_policy(model, Layout(world), train, torch.float32, settings, 5)


def learn(policy) -> None:
    for _ in range(2):
        policy.update(global_batch(), loss, TEMPERATURE)


class Road:
    """A policy whose weights pass through what a test does to them."""

    def __init__(self, policy, change) -> None:
        self._policy, self._change = policy, change
        self.layout, self.sees = policy.layout, policy.sees
        self.awake, self.logprobs = policy.awake, policy.logprobs

    def weights(self):
        for name, tensor in self._policy.weights():
            yield name, self._change(name, tensor)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("model"), **VLLM_SIZES)


@pytest.mark.parametrize(
    "name", ["native", pytest.param("vllm", marks=needs_vllm), pytest.param("sglang", marks=needs_sglang)]
)
def test_merged_weights_arrive_and_no_fault_of_an_adapter_passes(name: str, path) -> None:
    with started_engine(name, path) as engine, one_rank() as world:
        policy = learner(path, world)
        weights.build(policy, engine, world)(version=0)
        base = {name: tensor.clone() for name, tensor in policy.weights()}
        plain = dict(build_model(path, torch.float32, "cpu").named_parameters())
        assert all(torch.equal(base[name], p) for name, p in plain.items()), "an adapter begins with the model as it is"
        learn(policy)
        stale = {name: tensor.clone() for name, tensor in policy.weights()}
        learn(policy)
        assert weights.build(policy, engine, world)(version=1)["publish/probe_abs_diff"] < 1e-5
        faults = {
            "dropped": lambda name, tensor: base[name],
            "stale": lambda name, tensor: stale[name],
            "half scaled": lambda name, tensor: (tensor + base[name]) / 2,
            "of one layer alone": lambda name, tensor: base[name] if "layers.1." in name else tensor,
        }
        for fault, change in faults.items():
            with pytest.raises(RunFailed, match="version 2, rank 0: the engine's logprobs are .* from the trainer's"):
                weights.build(Road(policy, change), engine, world)(version=2)
                pytest.fail(f"an adapter that is {fault} has passed")


def published(path, world, engine):
    """A policy whose first publish brought all, and the second adapters alone; and what publishes it."""
    policy = learner(path, world)
    publish = weights.build(AdapterSource(policy), engine, world)
    whole = publish(version=0)
    learn(policy)
    alone = publish(version=1)
    assert max(whole["publish/probe_abs_diff"], alone["publish/probe_abs_diff"]) < 1e-5
    assert alone["publish/bytes"] < whole["publish/bytes"] / 5
    held = dict(engine.loaded_weights())
    assert len(held) == 2 * 2 * 7 and all(tensor is not None for tensor in held.values())
    return policy, publish


@needs_vllm
def test_adapters_alone_arrive_in_vllm_and_no_fault_passes(path) -> None:
    """Faults of an adapter that is nearly 0, of which a probe sees nothing: the bytes that vLLM computes with do."""
    with vllm_engine(path, lora=LORA) as engine, solo() as world:
        policy, publish = published(path, world, engine)
        layer = engine.model.model.layers[1].self_attn.qkv_proj
        put = engine.llm.add_lora

        def after(change):
            def changed(request):
                taken = put(request)
                change()
                return taken

            return changed

        before = [tensor.clone() for tensor in layer.lora_b_stacked]
        faults = {
            "dropped": lambda request: True,
            "zero": after(lambda: layer.reset_lora(0)),
            "half scaled": after(lambda: layer.lora_b_stacked[2].mul_(0.5)),
            "of the version before": after(lambda: layer.lora_b_stacked[1].copy_(before[1])),
            "swapped": after(lambda: layer.lora_a_stacked[0].copy_(layer.lora_a_stacked[2])),
        }
        policy.update(global_batch(), lambda lp, e, b: (1e-3 * loss(lp, e, b)[0], {}), TEMPERATURE)
        for fault, broken in faults.items():
            engine.llm.add_lora = broken
            with pytest.raises(RunFailed, match=r"rank 0: the engine holds other bytes of base_model\.model"):
                publish(version=2)
                pytest.fail(f"an adapter that is {fault} has passed")
            engine.llm.add_lora = put
        publish(version=3)
        policy.update(global_batch(), loss, TEMPERATURE)
        engine.llm.add_lora = lambda request: False
        with pytest.raises(RunFailed, match="engine weights of version 4: vLLM did not take the adapter"):
            publish(version=4)


@needs_sglang
def test_adapters_alone_arrive_in_sglang_and_no_fault_passes(path) -> None:
    """As in vLLM; on the way in, and in the memory that SGLang computes with."""
    with sglang_engine(path, lora=LORA) as engine, solo() as world:
        policy, publish = published(path, world, engine)
        manager = engine.scheduler.tp_worker.model_runner.lora_manager
        put, fetch, before = manager.load_lora_adapter_from_tensors, manager.fetch_new_loras, engine.slot.given
        stem = "base_model.model.model.layers.1.self_attn."
        q, v = f"{stem}q_proj.lora_A.weight", f"{stem}v_proj.lora_A.weight"
        b = f"{stem}k_proj.lora_B.weight"
        faults = {
            "dropped": lambda new: before,
            "zero": lambda new: {name: tensor * 0 for name, tensor in new.items()},
            "half scaled": lambda new: new | {b: new[b] / 2},
            "of the version before": lambda new: new | {b: before[b]},
            "swapped": lambda new: new | {q: new[v], v: new[q]},
            "of fewer layers": lambda new: {name: tensor for name, tensor in new.items() if "down_proj" not in name},
        }
        policy.update(global_batch(), lambda lp, e, b: (1e-3 * loss(lp, e, b)[0], {}), TEMPERATURE)
        for fault, change in faults.items():
            manager.load_lora_adapter_from_tensors = lambda ref, new, config, c=change: put(ref, c(new), config)
            with pytest.raises(RunFailed, match=r"rank 0: the engine holds other bytes of base_model\.model"):
                publish(version=2)
                pytest.fail(f"an adapter that is {fault} has passed")
        manager.load_lora_adapter_from_tensors = put
        buffer = manager.memory_pool.B_buffer["qkv_proj"][1]
        manager.fetch_new_loras = lambda ids: (fetch(ids), buffer[0, 3].add_(1e-6))
        with pytest.raises(RunFailed, match="the engine holds other bytes of .*q_proj.lora_B"):
            publish(version=2)
        manager.fetch_new_loras = fetch
        publish(version=3)
        with engine.awake():
            engine.add(Request("ends", array("i", [1, 2]), 9, 1.0, 0))
            engine.step()
            engine.abort(["ends"])
            assert [completion.finish_reason for completion in engine.step()] == ["abort"]
        publish(version=3)  # computes with what SGLang has yet to drop
        kept = buffer.clone()
        buffer[0, 3].add_(1e-6)
        with engine.awake(), pytest.raises(RunFailed, match="the engine lost .*q_proj.lora_B"):
            engine.add(Request("a", array("i", [1, 2]), 3, 1.0, 0))
        buffer.copy_(kept)
        engine.lost = ""
        refused = SimpleNamespace(success=False, error_message="no room")
        manager.load_lora_adapter_from_tensors = lambda *args: refused
        with pytest.raises(RunFailed, match="engine weights of version 4: SGLang did not take the adapter: no room"):
            publish(version=4)
