"""Start and stop of SGLang's scheduler in this process, on existing process groups.

Lists replace its server's sockets, and a step is one turn of its loop. Its API is private: the version is pinned, and
`tests/unit/test_sglang_contract.py` checks names.
"""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.eplb.expert_location import set_global_expert_location_metadata
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler, SpawnRanks
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import PortArgs, ServerArgs
from transformers import AutoConfig

from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.engine.guest import as_world, check_args
from spmd_rl.engine.sglang.guest import unpinned
from spmd_rl.engine.sglang.routing import recorded_experts, recording_experts
from spmd_rl.engine.sglang.sampler import SeededSampler
from spmd_rl.model.constraint import Constraint

ALWAYS = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    # Our sampler replaces it.
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_radix_cache": False,
    "schedule_policy": "fcfs",
    "num_continuous_decode_steps": 1,
    "stream_interval": 1,
    "random_seed": 0,
    "watchdog_timeout": 1e8,
    "pp_size": 1,
    "dp_size": 1,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "quantization": None,
}
"""Arguments that the engine depends on"""
REASONS = {
    "disable_overlap_schedule": "or a batch would be scheduled before the last one's tokens are read",
    "disable_radix_cache": "or the answers to one prompt would compute it again and again",
    "schedule_policy": "so that requests are admitted in the order of `add`",
    "speculative_algorithm": "as drafts are accepted by a sampler that reports other logprobs",
    "quantization": "or logprobs would be another model's than the trainer's",
    "watchdog_timeout": "or a long step would end the launcher; the journal finds stalls",
    "load_format": "as the trainer publishes the weights",
    "sampling_backend": "as this engine replaces the sampler",
}
OURS = {
    "model_path": "policy.model",
    "dtype": "policy.dtype",
    "trust_remote_code": "policy.trust_remote_code",
    "tp_size": "engine.tp",
    "max_running_requests": "engine.max_running",
    "max_total_tokens": "engine.kv_tokens",
    "enable_memory_saver": "train.offload",
    "enable_return_routed_experts": "policy.router_replay",
    "device": "the rank",
}
"""Arguments decided by our settings"""
BY_DEVICE = {"cpu": {"attention_backend": "torch_native", "disable_cuda_graph": True, "page_size": 1}}
"""Arguments by device type; a user's values win"""


class HostedScheduler(Scheduler):
    """SGLang's scheduler without its sockets."""

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        """Drop outgoing messages: batches contain the same."""
        mute = SimpleNamespace(send_output=lambda output, request=None: None)
        self.ipc_channels = SimpleNamespace(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=mute,
            send_to_detokenizer=mute,
            send_metrics_from_scheduler=None,
        )
        self.recv_from_tokenizer = self.load_snapshot_writer = None

    def init_request_receiver(self) -> None:
        """Receive requests from a list, equal on all ranks of a replica."""
        self.inbox: list[TokenizedGenerateReqInput | AbortReq] = []
        self.request_receiver = SimpleNamespace(recv_requests=self._received)

    def _received(self, local_reqs: list[AbortReq]) -> list:
        received, self.inbox = self.inbox + local_reqs, []
        return received

    def turn(self) -> ScheduleBatch | None:
        """Run one turn; return its batch, or None without work."""
        # SGLang computes adapters with pinned memory.
        with unpinned() if self.enable_lora else nullcontext():
            return self._turn()

    def _turn(self) -> ScheduleBatch | None:
        self.ingest_requests()
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            lengths = batch.extend_lens if batch.forward_mode.is_extend() else [1] * len(batch.reqs)
            last = (end - 1 for end in accumulate(lengths))
            self.tp_worker.model_runner.sampler.batch = dict(zip((req.rid for req in batch.reqs), last, strict=True))
            self.process_batch_result(batch, self.run_batch(batch))
        else:
            self.on_idle()
        self.last_batch = batch
        return batch


def start(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tp: int,
    max_running: int,
    kv_tokens: int,
    replica: dist.ProcessGroup,
    sleeps: bool = False,
    trust: bool = False,
    constraint: Constraint | None = None,
    records_experts: bool = False,
    args: Mapping[str, Any] | None = None,
) -> HostedScheduler:
    """[replica] Start SGLang with unset weights. constraint: grammar of all answers.

    records_experts: see `NativeEngine`. args: the user's `ServerArgs`; UserError if unknown, or decided elsewhere.
    """
    args = dict(args or {})
    check_args(args, ServerArgs, OURS, ALWAYS, REASONS)
    config = AutoConfig.from_pretrained(model_folder(path), trust_remote_code=trust)
    settings = ServerArgs(
        model_path=str(model_folder(path)),
        trust_remote_code=trust,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        tp_size=tp,
        max_running_requests=max_running,
        max_total_tokens=kv_tokens,
        enable_memory_saver=sleeps,
        enable_return_routed_experts=records_experts,
        **ALWAYS
        | {"context_length": min(config.max_position_embeddings, kv_tokens), "log_level": "error"}
        | BY_DEVICE.get(device.type, {})
        | args,
    )
    nobody = ("tokenizer", "scheduler_input", "detokenizer", "rpc", "metrics")
    ports = PortArgs(
        **{f"{name}_ipc_name": "" for name in nobody},
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
        nccl_port=0,
    )
    with as_world(replica), recording_experts(records_experts):
        place = SpawnRanks(world_rank=dist.get_rank(replica), dp_rank=None, gpu_id=device.index or 0)
        publish(settings, role="scheduler", ranks=place)
        scheduler = HostedScheduler(settings, ports)
    scheduler.tp_worker.model_runner.sampler = SeededSampler(constraint, recorded_experts())
    if scheduler.max_total_num_tokens < kv_tokens:
        raise UserError(
            f"engine.kv_tokens: the device has room for {scheduler.max_total_num_tokens} tokens, not {kv_tokens}; "
            "engine.args.mem_fraction_static bounds what SGLang takes"
        )
    return scheduler


def stop(replica: dist.ProcessGroup) -> None:
    """Leave SGLang's groups without communication; the default group remains."""
    # Otherwise another mixture could not start in this process.
    set_global_expert_location_metadata(None, allow_overwrite=True)
    if not dist.is_initialized():
        return
    # SGLang may have dropped an older group already.
    with suppress(AssertionError):
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    dist.destroy_process_group(replica)
