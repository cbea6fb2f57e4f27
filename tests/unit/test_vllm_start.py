"""What vLLM is told at its start, and how it is put to sleep: against its own argument list and executor."""

from types import SimpleNamespace

import pytest
import torch

from spmd_rl.base.errors import UserError
from spmd_rl.engine.guest import check_args
from tests.engines import VLLM_SIZES, needs_vllm, vllm_engine
from tests.models import tiny

pytestmark = needs_vllm


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_num_batch_tokens", "has no such argument"),
        ("tensor_parallel_size", "decided by engine.tp"),
        ("enable_expert_parallel", "must be False, as vLLM's CPU kernel crashes"),
        ("pipeline_parallel_size", "decided by engine.pp"),
        ("logprobs_mode", "must be 'processed_logprobs', the logprobs of what was drawn from"),
    ],
)
def test_an_argument_that_is_not_the_users_to_choose_is_refused(name, words):
    from vllm.engine.arg_utils import EngineArgs

    from spmd_rl.engine.vllm.start import ALWAYS, OURS, REASONS

    check_args({"max_num_batched_tokens": 512, "kv_cache_dtype": "fp8"}, EngineArgs, OURS, ALWAYS, REASONS)
    with pytest.raises(UserError, match=rf"engine\.args\.{name}: .*{words}"):
        check_args({name: 1}, EngineArgs, OURS, ALWAYS, REASONS)


@pytest.mark.parametrize(
    ("device", "own", "runner"), [("cuda", None, True), ("cuda", "0", False), ("cpu", None, False), ("npu", None, None)]
)
def test_which_model_runner_is_said(device, own, runner, monkeypatch):
    from vllm.envs import environment_variables

    from spmd_rl.engine.vllm.guest import hosted

    name = "VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.setenv(name, own or "")
    if own is None:
        monkeypatch.delenv(name)
    with hosted(device):
        assert environment_variables[name]() is runner


class Llm:
    """What `VllmEngine` reads of vLLM at its start, over vLLM's own account of what sleeps."""

    def __init__(self):
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        self.calls = []
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=5, block_size=16),
            model_config=SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 260),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            speculative_config=None,
        )
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(), batch_queue=None))
        self.model_executor = executor = UniProcExecutor.__new__(UniProcExecutor)
        executor.sleeping_tags = set()
        if not isinstance(getattr(type(executor), "is_sleeping", None), property):  # a flag of its own up to 0.24
            executor.is_sleeping = False
        executor.collective_rpc = lambda method, kwargs: self.calls.append((method, *kwargs.values()))
        executor.driver_worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: torch.nn.Module()))
        self.sleep, self.wake_up = executor.sleep, executor.wake_up


def test_a_replica_that_got_no_request_gives_its_weights_memory_back(monkeypatch):
    """vLLM counts as asleep until its cache is awake too, and would pass over the order to sleep."""
    from spmd_rl.engine.vllm.engine import VllmEngine

    llm = Llm()
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: llm.calls.append("empty"))
    engine = VllmEngine(llm, {}, sleeps=True)
    assert llm.calls == [("sleep", 1)]
    for _ in range(2):
        llm.calls.clear()
        with engine.awake():
            assert llm.calls == ["empty", ("wake_up", ["weights"])]
        assert llm.calls[2:] == ["empty", ("wake_up", ["kv_cache"]), ("sleep", 1)]
        assert llm.model_executor.sleeping_tags == {"weights", "kv_cache"}


def test_what_fails_leaves_no_group_to_the_next(tmp_path, monkeypatch) -> None:
    """In its start as well as in a test: the next engine of the process starts."""
    from spmd_rl.engine.vllm import start

    path = tiny("llama", tmp_path, **VLLM_SIZES)

    def broken(llm):
        raise ValueError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(start, "_in_stages", broken)
        with pytest.raises(ValueError, match="on purpose"), vllm_engine(path):
            pass
    with pytest.raises(ZeroDivisionError), vllm_engine(path):
        1 / 0
    with vllm_engine(path) as engine:
        assert engine.num_unfinished == 0
