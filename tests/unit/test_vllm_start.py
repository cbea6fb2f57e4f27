"""What vLLM is told at its start, and how it is put to sleep: against its own argument list and executor."""

from array import array
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.base.errors import UserError
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.engine.guest import check_args
from spmd_rl.types import Request
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


@pytest.mark.parametrize(
    ("device", "settings", "is_constrained", "wanted"),
    [
        ("cuda", {"tp": 8}, False, True),
        ("cpu", {}, False, False),
        ("cuda", {"pp": 2}, False, False),
        ("cuda", {"drafts": 3}, False, False),
        ("cuda", {}, True, False),
    ],
)
def test_where_steps_are_scheduled_ahead(device, settings, is_constrained, wanted):
    from spmd_rl.engine.vllm.assemble import runs_ahead

    assert runs_ahead(EngineConfig(name="vllm", **settings), device, is_constrained) is wanted


def test_a_step_on_a_device_has_few_tokens_whatever_the_model_takes(tmp_path):
    """The workspace of DeepSeek-V3's experts, for 163,840 tokens 18.8 GB, is 1.9 GB."""
    from spmd_rl.engine.vllm.start import lengths

    path = tiny("llama", tmp_path, max_position_embeddings=163_840)
    assert lengths(path, 262_144, False, cpu=False) == {"max_model_len": 163_840, "max_num_batched_tokens": 16_384}


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
        pause = lambda: self.calls.append("pause")  # noqa: E731
        self.has_finished = False
        scheduler = SimpleNamespace(has_finished_requests=lambda: self.has_finished)
        core = SimpleNamespace(scheduler=scheduler, batch_queue=None, pause_scheduler=pause)
        self.engine_core = SimpleNamespace(engine_core=core)
        self.model_executor = executor = UniProcExecutor.__new__(UniProcExecutor)
        executor.sleeping_tags = set()
        if not isinstance(getattr(type(executor), "is_sleeping", None), property):  # a flag of its own up to 0.24
            executor.is_sleeping = False
        executor.collective_rpc = self.called
        executor.driver_worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: torch.nn.Module()))
        self.sleep, self.wake_up = executor.sleep, executor.wake_up

    def step(self):
        self.has_finished = False

    def called(self, method, args=(), kwargs=None):
        self.calls.append((method, *args, *(kwargs or {}).values()))

    def release_kv_cache_memory(self):
        assert not self.model_executor.is_sleeping and not self.has_finished, "as vLLM asks"
        self.model_executor.discard(("kv_cache",))


def ask(engine):
    engine.begin(Request("a", array("i", [1, 2]), 2, 1.0, 0))
    engine.under_way.clear()
    engine.llm.has_finished = True


WAKE, ASK, FREE = [("wake_up", ["weights"])], [("wake_up", ["kv_cache"])], ["pause", ("discard", ("kv_cache",))]


@pytest.mark.parametrize(("slot", "level"), [(None, 2), (SimpleNamespace(held=lambda: (), brings_base=False), 1)])
def test_a_step_copies_no_weights(monkeypatch, slot, level):
    """From a publish to the end of the step they stay, and then they are dropped, but those below adapters."""
    from spmd_rl.engine.vllm.engine import VllmEngine

    llm = Llm()
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    engine = VllmEngine(llm, {}, sleeps=True, slot=slot)
    assert llm.calls == [*FREE, ("sleep", level)]
    for is_probed in (True, False):
        llm.calls.clear()
        with engine.awake():  # a publish
            engine.version = 1
            if is_probed:
                ask(engine)
        assert llm.calls == WAKE + (ASK + FREE) * is_probed
        llm.calls.clear()
        with engine.awake():  # a replica that gets no request
            pass
        with engine.awake():
            ask(engine)
        assert llm.calls == ASK + FREE
        llm.calls.clear()
        engine.sleep()
        engine.sleep()
        assert llm.calls == [("sleep", level)], "vLLM copies weights to the host at level 1 alone"
        assert llm.model_executor.sleeping_tags == {"weights", "kv_cache"}
        assert engine.version == (None if slot is None else 1), "the next load must bring all"


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
