"""Every name, parameter and behaviour of SGLang's insides that our engine leans on. Another version may have others."""

import ast
import importlib
import inspect
import re
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
import torch

from spmd_rl.engine.sglang.guest import hosted
from spmd_rl.model.build import build_model
from tests.engines import needs_sglang, sglang_engine
from tests.models import tiny
from tests.unit.test_sglang_engine import ask, drain, run

pytestmark = needs_sglang
ROOT = Path(__file__).parents[2]
SCHEDULER, IO = "sglang.srt.managers.scheduler:Scheduler", "sglang.srt.managers.io_struct"
CAPTURER = "sglang.srt.state_capturer.routed_experts:RoutedExpertsCapturer"
ADAPTERS = "sglang.srt.lora.lora_manager:LoRAManager"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

SIGNATURES = {
    SCHEDULER: "server_args, port_args",
    f"{SCHEDULER}.init_ipc_channels": "self, port_args",
    f"{SCHEDULER}.init_request_receiver": "self",
    f"{SCHEDULER}.ingest_requests": "self, stop_at_pause=False",
    f"{SCHEDULER}.get_next_batch_to_run": "self, running_batch, last_batch",
    f"{SCHEDULER}.run_batch": "self, batch, pp_proxy_tensors=None",
    f"{SCHEDULER}.process_batch_result": "self, batch, result",
    f"{SCHEDULER}.on_idle": "self",
    f"{SCHEDULER}.flush_cache": "self, empty_cache=True",
    f"{UPDATER}.release_memory_occupation": "self, recv_req",
    f"{UPDATER}.resume_memory_occupation": "self, recv_req",
    "sglang.srt.runtime_context:publish": "server_args, role, hf_config=None, ranks=None",
    "sglang.srt.runtime_context:SpawnRanks": "world_rank, dp_rank=None, gpu_id=None",
    "sglang.srt.distributed.parallel_state:destroy_model_parallel": "",
    "sglang.srt.layers.sampler:Sampler": "",
    "sglang.srt.layers.sampler:Sampler.forward": "self, logits_output, sampling_info, return_logprob, "
    "top_logprobs_nums, token_ids_logprobs, positions, logprob_logits=None",
    "sglang.srt.sampling.sampling_params:SamplingParams.normalize": "self, tokenizer",
    "sglang.srt.managers.schedule_batch:Req.finished": "self",
    f"{CAPTURER}.create": "model, model_config, num_tokens, max_running_requests, device",
    f"{CAPTURER}.capture": "self, layer_id, topk_indices",
    f"{CAPTURER}.on_forward_end": "self, forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu=False",
    "sglang.srt.state_capturer.base:BaseDeviceCache": "max_batch_size, num_layers, topk_size, device, name",
    "sglang.srt.eplb.expert_location:set_global_expert_location_metadata": "value, allow_overwrite=False",
    f"{ADAPTERS}.load_lora_adapter_from_tensors": "self, lora_ref, tensors, config_dict, added_tokens_config=None",
    f"{ADAPTERS}.unload_lora_adapter": "self, lora_ref",
    f"{ADAPTERS}.fetch_new_loras": "self, new_loras, running_loras=set()",
}
"""Parameters and defaults."""
NAMES = {
    f"{IO}:TokenizedGenerateReqInput": "rid input_text input_ids input_embeds mm_inputs token_type_ids sampling_params "
    "return_logprob logprob_start_len top_logprobs_num token_ids_logprob stream extra_key lora_id",
    f"{IO}:AbortReq": "rid",
    f"{IO}:ReleaseMemoryOccupationReqInput": "tags",
    f"{IO}:ResumeMemoryOccupationReqInput": "tags",
    "sglang.srt.sampling.sampling_params:SamplingParams": "max_new_tokens ignore_eos",
    "sglang.srt.server_args:PortArgs": "tokenizer_ipc_name scheduler_input_ipc_name detokenizer_ipc_name rpc_ipc_name "
    "metrics_ipc_name tokenizer_worker_ipc_name decoupled_spec_ipc_config nccl_port",
    "sglang.srt.layers.logits_processor:LogitsProcessorOutput": "next_token_logits",
    "sglang.srt.distributed.parallel_state": "_WORLD",
    "sglang.srt.managers.schedule_batch:ScheduleBatch": "extend_lens forward_mode",
    "sglang.srt.model_executor.model_runner": "RoutedExpertsCapturer",
    "sglang.srt.layers.moe.topk:TopK": "layer_id",
    "sglang.srt.lora.lora_registry:LoRARef": "lora_id lora_name lora_path pinned",
    "sglang.srt.server_args:ServerArgs": "enable_lora max_loras_per_batch max_lora_rank lora_target_modules "
    "lora_backend enable_return_routed_experts",
}
"""What is passed to a class by name, or read of a module."""


def found(path: str):
    module, _, names = path.partition(":")
    with hosted("cpu"):
        one = importlib.import_module(module)
    for name in names.split(".") if names else []:
        one = getattr(one, name)
    return one


def signature(path: str) -> str:
    """The parameters of a class or function, with defaults, without types."""
    parameters = inspect.signature(found(path)).parameters.values()
    return ", ".join(p.name + ("" if p.default is p.empty else f"={p.default!r}") for p in parameters)


def faults(signatures: dict[str, str], names: dict[str, str]) -> list[str]:
    """All that our engine leans on and this SGLang does not have."""
    wrong = []
    for path, expected in signatures.items():
        try:
            taken = signature(path)
        except AttributeError:
            taken = None
        if taken != expected:
            wrong.append(f"{path}({taken}), not ({expected})")
    for path, expected in names.items():
        one = found(path)
        known = {*vars(one), *(inspect.signature(one).parameters if inspect.isclass(one) else ())}
        wrong += [f"{path} has no {name}" for name in expected.split() if name not in known]
    return wrong


def test_it_has_what_we_lean_on():
    assert not faults(SIGNATURES, NAMES)


def test_what_it_does_not_have_is_found_out():
    assert len(faults({f"{SCHEDULER}.flush_cache": "self", f"{SCHEDULER}.flush": "self"}, {})) == 2
    assert len(faults({}, {f"{IO}:AbortReq": "rid request_id"})) == 1


def test_the_version_is_the_pinned_one():
    pins = [
        re.search(r"sglang==([\d.]+)", (ROOT / name).read_text())[1]
        for name in ("pyproject.toml", "launch/sglang-cpu.txt")
    ]
    assert {metadata.version("sglang"), *pins} == {pins[0]}


def test_a_turn_is_that_of_its_own_loop():
    """The calls of `event_loop_normal`, in order, are those of our `turn`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(found(f"{SCHEDULER}.event_loop_normal"))))
    calls = [
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    verbs = ("ingest_requests", "get_next_batch_to_run", "run_batch", "process_batch_result", "on_idle")
    others = {"_record_scheduler_state_for_paused_engine", "get", "self_check_during_busy"}
    assert {call for call in calls if call not in others} == set(verbs)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tiny("llama", tmp_path_factory.mktemp("model"))
    with sglang_engine(path, max_running=4, kv_tokens=1024) as engine:
        engine.load(build_model(path, torch.float32, "cpu").named_parameters(), version=1)
        yield engine


def test_a_flush_is_refused_until_it_has_been_idle(engine):
    engine.add(ask("a", new=3))
    engine.step()
    assert not engine.scheduler.flush_cache(empty_cache=False)
    drain(engine)
    assert not engine.scheduler.flush_cache(empty_cache=False), "no turn has been idle yet"
    engine.scheduler.turn()
    assert engine.scheduler.flush_cache(empty_cache=False)


def test_keys_are_shared_by_the_same_extra_key_alone(engine):
    run(engine, ask("a", range(30)))
    engine.token_counts.asked = engine.token_counts.cached = 0
    run(engine, ask("b", range(30)))
    assert engine.token_counts.cached == 29
    engine.version = 2
    run(engine, ask("c", range(30)))
    engine.version = 1
    assert engine.token_counts.cached == 29
