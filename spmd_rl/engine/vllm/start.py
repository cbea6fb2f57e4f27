"""Start and stop of vLLM's engine in this process, on existing process groups.

The executor is vLLM's `external_launcher`, given as arguments what it would read from torchrun's environment, so that
plain Python works too.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig
from vllm import _custom_ops  # noqa: F401  loads the kernels, among them one that `_memory_unbound` holds back
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from spmd_rl.base.hub import model_folder
from spmd_rl.config.architectures import sees_pictures
from spmd_rl.config.sections.rollout import MAX_TOP_K
from spmd_rl.engine.guest import as_world, check_args
from spmd_rl.engine.vllm.drafts import engine_args

# vLLM's default of 128 would round short prompts up fourfold and share none.
CPU_BLOCK = 32
"""Tokens of a KV block on the CPU"""
BLOCK = 16
"""Tokens of a KV block elsewhere, unless the attention kernel differs"""

# vLLM keeps all tokens whose logit equals the last one's.
TIES = 32
"""Spare candidates beyond twice `top_k`"""
MAX_LOGPROBS = 2 * MAX_TOP_K + TIES

ALWAYS = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    # The model's generation config would change stop tokens and sampling.
    "generation_config": "vllm",
    "distributed_executor_backend": "external_launcher",
    "disable_custom_all_reduce": True,
    "enable_prefix_caching": True,
    "enable_expert_parallel": False,
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": MAX_LOGPROBS,
    "seed": 0,
    "disable_log_stats": True,
    # vLLM requires this share of memory to be free, although the cache's size is set in bytes.
    "gpu_memory_utilization": 0.01,
}
"""Arguments that the engine depends on"""
NO_VIDEO = {"video": 0}
# vLLM asks its own processor of pictures, which needs a tokenizer, for sizes alone.
SEEING = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": NO_VIDEO,
    "mm_processor_cache_gb": 0,
    # vLLM's dummy weights overwrite the mean and deviation of a tower that normalises pixels itself, and no publish has
    # them: logprobs would be off by 0.1 to 1 nats.
    "mm_device_do_normalize": False,
    # The size of the cache is given, so nothing has to be measured.
    "skip_mm_profiling": True,
}
"""Further arguments for models with pictures"""
REASONS = {
    "enable_expert_parallel": "as vLLM's CPU kernel crashes with it, and it is untested on GPUs",
    "enable_prefix_caching": "or the answers to one prompt would compute it again and again",
    "logprobs_mode": "the logprobs of what was drawn from",
    "load_format": "as the trainer publishes the weights",
    "generation_config": "or the model's own would replace the settings of sampling",
}
OURS = {
    "model": "policy.model",
    "dtype": "policy.dtype",
    "trust_remote_code": "policy.trust_remote_code",
    "tensor_parallel_size": "engine.tp",
    "pipeline_parallel_size": "engine.pp",
    "data_parallel_size": "the number of ranks",
    "max_num_seqs": "engine.max_running",
    "num_gpu_blocks_override": "engine.kv_tokens",
    "kv_cache_memory_bytes": "engine.kv_tokens",
    "enable_sleep_mode": "train.offload",
    "speculative_config": "engine.drafts",
    "quantization": "engine.quantization",
}
"""Arguments decided by our settings"""
# As in vLLM's offline `LLM` on large GPUs.
DEVICE_TOKENS = 16384
"""Most tokens of a step on a device"""


def start(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tp: int,
    pp: int = 1,
    max_running: int,
    kv_tokens: int,
    local_rank: int,
    replica: dist.ProcessGroup,
    sleeps: bool = False,
    trust: bool = False,
    drafts: int = 0,
    args: Mapping[str, Any] | None = None,
) -> LLMEngine:
    """[replica] Start vLLM with unset weights. args: the user's `EngineArgs`; UserError if unknown, or decided
    elsewhere."""
    always = ALWAYS | (SEEING if sees_pictures(model_folder(path)) else {})
    check_args(args := dict(args or {}), EngineArgs, OURS, always, REASONS)
    cpu = device.type == "cpu"
    block = CPU_BLOCK if cpu else BLOCK
    # vLLM reserves one block.
    num_blocks = -(-kv_tokens // block) + 1
    config = EngineArgs(
        model=str(model_folder(path)),
        trust_remote_code=trust,
        dtype=str(dtype).removeprefix("torch."),
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        max_num_seqs=max_running,
        num_gpu_blocks_override=num_blocks,
        enable_sleep_mode=sleeps,
        **always | lengths(path, (num_blocks - 1) * block, trust, cpu) | engine_args(drafts, cpu) | args,
    ).create_engine_config()
    # The number of blocks is fixed above, on all ranks alike; this keeps vLLM from sizing the cache by free memory.
    config.cache_config.kv_cache_memory_bytes = num_blocks * block * _bytes_per_token(config)

    class Executor(ExecutorWithExternalLauncher):
        """vLLM's executor without torchrun's variables."""

        # The address is unused, as the default group exists. On the CPU vLLM would reduce through shared memory named
        # after its last part: it busy-waits, and its files stay behind. Ranks with different names reduce over gloo
        # instead, so each rank and start uses a new one.

        world = replica

        def _distributed_args(self) -> tuple[str, int, int]:
            return f"env://:{secrets.token_hex(8)}", dist.get_rank(), local_rank

    # Otherwise vLLM compiles an unused function, which needs a C++ compiler.
    if cpu:
        type(current_platform).simple_compile_backend = "eager"
    with _memory_unbound(), as_world(replica):
        llm = LLMEngine(config, executor_class=Executor, log_stats=False, multiprocess_mode=False)
    _in_stages(llm)
    # At exit, or when it is collected, it would end the default process group, which is not its own.
    if (finalizer := getattr(llm.engine_core, "_finalizer", None)) is not None:
        finalizer.detach()
    return llm


def model_of(llm: LLMEngine) -> nn.Module:
    """Return vLLM's module in this process."""
    return llm.model_executor.driver_worker.model_runner.get_model()


def lengths(path: Path | str, kv_tokens: int, trust: bool, cpu: bool) -> dict[str, Any]:
    """Return vLLM's limits on tokens."""
    config = AutoConfig.from_pretrained(model_folder(path), trust_remote_code=trust).get_text_config()
    max_tokens = min(config.max_position_embeddings, kv_tokens)
    if not cpu:
        # Longer prompts are computed in chunks: a mixture's workspace grows with the tokens of a step.
        return {"max_model_len": max_tokens, "max_num_batched_tokens": DEVICE_TOKENS}
    # On the CPU vLLM cannot rewind a seeded generator after a chunk of a prompt, so prompts are computed whole.
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(2048, max_tokens)}
    return {"max_model_len": max_tokens, "block_size": CPU_BLOCK, "enforce_eager": True, **whole}


def _in_stages(llm: LLMEngine) -> None:
    # vLLM would schedule a second step before the first one's tokens are read, but with externally launched ranks the
    # two do not overlap.
    if llm.vllm_config.parallel_config.pipeline_parallel_size == 1:
        return
    core, runner = llm.engine_core.engine_core, llm.model_executor.driver_worker.model_runner
    core.batch_queue, core.step_fn = None, core.step
    # Without a warm-up the buffers of later stages do not exist yet.
    if runner.intermediate_tensors is None and not parallel_state.get_pp_group().is_first_rank:
        size, dtype, device = runner.max_num_tokens, runner.model_config.dtype, runner.device
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(size, dtype, device)


@contextmanager
def _memory_unbound() -> Iterator[None]:
    # On the CPU vLLM binds all memory of the process, including the trainer's, to one node.
    ops = torch.ops._C
    bind = getattr(ops, "init_cpu_memory_env", None)
    if bind is not None:
        ops.init_cpu_memory_env = lambda nodes: None
    yield
    if bind is not None:
        ops.init_cpu_memory_env = bind


def _bytes_per_token(config: VllmConfig) -> int:
    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_kv_heads(parallel) * model.get_head_size()
    return 2 * model.get_num_layers(parallel) * heads * model.dtype.itemsize


def stop(llm: LLMEngine) -> None:
    """Free the engine and leave its groups, without communication; the default group remains."""
    llm.model_executor.shutdown()
    if not dist.is_initialized():
        return
    replica = llm.model_executor.world
    # vLLM may have dropped an older group already.
    with suppress(AssertionError):
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
    parallel_state._WORLD = parallel_state._NODE_COUNT = None
    dist.destroy_process_group(replica)
