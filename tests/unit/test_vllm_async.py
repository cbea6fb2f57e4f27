"""vLLM that schedules a step before the last one's tokens are read: the same answers, and nothing of it outlives them.

On the CPU vLLM switches this off. Here its scheduler and its queue do it, over the runner for the CPU, which computes
each step at once: left out is what a GPU's runner does, which copies tokens back while the next step runs.
"""

from array import array

import pytest
import torch

from spmd_rl.model.build import build_model
from spmd_rl.types import Request
from tests.engines import VLLM_SIZES, needs_vllm, vllm_engine
from tests.models import tiny

pytestmark = needs_vllm


def text_of(ids) -> str:
    return "".join(chr(97 + id % 8) for id in ids)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("model"), **VLLM_SIZES)


def weights(path, version: int) -> list:
    model = build_model(path, torch.float32, "cpu")
    return [(name, weight * (1 + version / 8)) for name, weight in model.named_parameters()]


def requests(names: str) -> list[Request]:
    """Of several lengths, greedy and drawn, some with stop strings and stop tokens."""
    made = []
    for n, name in enumerate(names):
        ends = ({}, {"stop": ("ab", "fa", "gg")}, {"stop_ids": tuple(range(0, 260, 9))})[n % 3]
        made.append(Request(name, array("i", range(n, 3 + 9 * n)), 3 + 5 * n % 17, n % 2 / 1.0, 100 + n, **ends))
    return made


def story(engine, path) -> list:
    """Requests, aborts, ids that come again, and new weights; all completions in the order of their ids."""
    engine.text_of, told = text_of, []

    def drain() -> None:
        done = []
        while engine.num_unfinished:
            done += engine.step()
        told.append(sorted((c.id, c.token_ids.tolist(), c.versions.tolist(), c.finish_reason) for c in done))

    for version in range(3):
        engine.load(weights(path, version), version)
        engine.token_counts.cached = 0
        for request in requests("abcdefghij"):
            engine.add(request)
        drain()
        for request in requests("klmnop"):
            engine.add(request)
        while not any(row.token_ids for row in engine.under_way.values()):  # a step ahead has run, and is not read
            engine.step()
        engine.abort(["k", "n", "o"])
        aborted = {c.id for c in engine.step() if c.finish_reason == "abort"}
        assert aborted == {"k", "n", "o"}
        for request in requests("klmno")[::3]:
            engine.add(request)  # at once, under the same names
        drain()
        for request in requests("uvwx"):
            engine.add(request)
        while not any(row.token_ids for row in engine.under_way.values()):
            engine.step()
        engine.abort("uvwx")
        engine.step()
    return told


def test_answers_are_the_same_and_nothing_outlives_them(path, monkeypatch) -> None:
    with vllm_engine(path, max_running=4, kv_tokens=2048) as engine:
        assert engine.llm.engine_core.engine_core.batch_queue is None
        expected = story(engine, path)
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    checked, made, kind = current_platform.check_and_update_config, GPUModelRunner.__init__, type(current_platform)

    def check(config) -> None:
        checked(config)
        config.scheduler_config.async_scheduling = True

    def make(runner, config, device) -> None:
        config.scheduler_config.async_scheduling = False  # it knows no streams
        made(runner, config, device)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(kind, "check_and_update_config", staticmethod(check))
    monkeypatch.setattr(GPUModelRunner, "__init__", make)
    with vllm_engine(path, max_running=4, kv_tokens=2048, args={"async_scheduling": True}) as engine:
        core, ahead = engine.llm.engine_core.engine_core, []
        update = core.scheduler.update_from_output
        monkeypatch.setattr(
            core.scheduler, "update_from_output", lambda *args: (ahead.append(len(core.batch_queue)), update(*args))[1]
        )
        assert type(core.scheduler).__name__ == "AsyncScheduler" and core.batch_queue_size == 2
        assert story(engine, path) == expected
        assert sum(ahead) > len(ahead) / 2, "a step was scheduled before the one before it was read"
        assert core.batch_queue, "the last step is not read"
        engine.load(weights(path, 3), 3)
        assert not core.batch_queue and not core.scheduler.has_requests()
