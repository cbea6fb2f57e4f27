"""Our SGLang engine as a machine: admission, bounds, stops, aborts, versions under way; and its manners as a guest."""

import logging
import multiprocessing
import os
import random
import signal
from array import array
from types import SimpleNamespace

import numpy
import pytest
import torch

from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import build_model
from spmd_rl.types import Completion, Request
from tests.engines import needs_sglang, sglang_engine
from tests.models import tiny

pytestmark = needs_sglang


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def weights(path):
    return list(build_model(path, torch.float32, "cpu").named_parameters())


@pytest.fixture(scope="module")
def other_weights(weights):
    return [(name, weight * 1.1) for name, weight in weights]


def state():
    """What SGLang would change in our process if it were let."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "PYTEST"))}
    return {
        "environment": environment,
        "threads": (torch.set_num_threads, torch.get_num_threads(), torch.get_float32_matmul_precision()),
        "generators": (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()),
        "handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "logging": (logging.root.handlers[:], logging.root.level, logging.root.manager.disable),
    }


@pytest.fixture(scope="module")
def started(path):
    """An engine without weights, and the process before and after it was started."""
    before = state()
    with sglang_engine(path, max_running=4, kv_tokens=1024) as engine:
        yield engine, before, state()


@pytest.fixture
def engine(started, weights):
    """The engine with its weights, as version 1."""
    engine = started[0]
    engine.load(weights, version=1)
    return engine


@pytest.fixture(scope="module")
def native(path):
    """The reference: the native engine, without weights."""
    return NativeEngine(empty_module(path, torch.float32), max_running=4, kv_tokens=1024)


def ask(id: str, prompt=(1, 2, 3), new=8, temperature=1.0, seed=0, **more) -> Request:
    return Request(id, array("i", prompt), new, temperature, seed, **more)


def drain(engine) -> dict[str, Completion]:
    done = {}
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
    return done


def run(engine, *requests: Request) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    return drain(engine)


def alike(mine: Completion, theirs: Completion) -> None:
    """The same tokens, versions and end; logprobs within 1e-5."""
    assert (mine.token_ids, mine.versions, mine.finish_reason) == (
        theirs.token_ids,
        theirs.versions,
        theirs.finish_reason,
    )
    assert mine.candidate_ids == theirs.candidate_ids
    torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-5, rtol=0)


def test_a_guest_leaves_the_process_as_it_was(started):
    _, before, after = started
    before["environment"]["GLOO_SOCKET_IFNAME"] = "lo"  # the fixture's
    for what, value in before.items():
        assert after[what] == value, what


def test_no_request_before_the_first_load(started):
    if started[0].version is None:
        with pytest.raises(AssertionError, match="no weights"):
            started[0].add(ask("early"))


def test_it_draws_the_native_engines_tokens(engine, native, weights):
    """Whatever runs beside them, cut off or not, and where an answer goes on that was cut short."""
    native.load(weights, version=1)
    cut = {"top_k": 40, "top_p": 0.8, "min_p": 0.05}
    requests = [ask(f"{i}", range(i + 1), 5 + i, i % 3 / 2, 2**64 - 1 - i, **(cut if i % 2 else {})) for i in range(9)]
    requests += [
        ask("on", (1, 2, 3, 40, 41), 6, seed=3, num_begun=2),
        ask("stop", new=30, seed=3, stop_ids=(7, 9, 250)),
    ]
    mine, theirs = run(engine, *requests), run(native, *requests)
    for request in requests:
        alike(mine[request.id], theirs[request.id])


def test_a_prompt_that_was_computed_is_not_computed_again(engine):
    prompt = range(40)
    first = run(engine, ask("a", prompt))["a"]
    engine.token_counts.asked = engine.token_counts.cached = 0
    assert run(engine, ask("a", prompt))["a"].token_ids == first.token_ids
    assert (engine.token_counts.asked, engine.token_counts.cached) == (40, 39)
    run(engine, ask("a", prompt, cache="of another name"))
    assert engine.token_counts.cached == 39


def test_admitted_in_the_order_of_add_up_to_max_running(engine):
    for i in range(10):
        engine.add(ask(f"{i}", new=2, seed=i))
    ended = [[c.id for c in engine.step()] for _ in range(6)]
    assert [ids for ids in ended if ids] == [[*"0123"], [*"4567"], [*"89"]]


def test_aborted_requests_come_back_with_what_they_have(engine):
    for i in range(6):
        engine.add(ask(f"{i}", new=50, seed=i))
    assert [engine.step() for _ in range(5)] == [[]] * 5
    engine.abort(["1", "5", "never", "1"])
    assert engine.num_unfinished == 6
    engine.add(ask("1", new=50, seed=1))  # while SGLang still drops the last of this name
    ended = {completion.id: completion for completion in engine.step()}
    assert {id: (len(c.token_ids), c.finish_reason) for id, c in ended.items()} == {
        "1": (5, "abort"),
        "5": (0, "abort"),
    }
    rest = drain(engine)
    assert rest.keys() == set("01234") and all(len(c.token_ids) == 50 for c in rest.values())
    assert rest["1"].token_ids[:5] == ended["1"].token_ids
    assert engine.num_unfinished == 0 and engine.step() == []


def test_more_than_the_cache_holds(engine, native, weights):
    """Together they outgrow the cache: some wait."""
    native.load(weights, version=1)
    requests = [ask(f"{i}", range(i, i + 250), 20, seed=i) for i in range(4)]
    mine = run(engine, *requests)
    for request in requests:
        alike(mine[request.id], run(native, request)[request.id])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("x", prompt=()), "at least one prompt token"),
        (ask("x", new=0), "one new token"),
        (ask("x", prompt=range(500), new=11), "511 tokens exceed 510"),
        (ask("x", temperature=-1.0), "negative temperature"),
        (ask("x", stop=("no tokenizer",), top_p=0.5), "need a top_k"),
    ],
)
def test_requests_that_are_refused(engine, request_, words):
    with pytest.raises(ValueError, match=words):
        engine.add(request_)
    assert engine.num_unfinished == 0


def test_a_request_as_long_as_the_engine_allows(engine):
    assert len(run(engine, ask("x", prompt=range(200), new=310))["x"].token_ids) == 310


def test_new_weights_under_way(engine, native, weights, other_weights):
    """Requests that have begun go on with their keys; one that waits does not find those of its prompt."""
    prompt = range(40)

    def swapped(engine) -> dict[str, Completion]:
        engine.load(weights, version=1)
        run(engine, ask("old", prompt))
        for i in range(5):
            engine.add(ask(f"{i}", prompt, 12, seed=i))
        assert [engine.step() for _ in range(4)] == [[]] * 4
        engine.load(other_weights, version=2)
        engine.add(ask("new", prompt, 12, seed=9))
        return drain(engine) | run(engine, ask("again", prompt, 12, seed=9))

    mine, theirs = swapped(engine), swapped(native)
    assert mine["0"].versions.tolist() == [1] * 4 + [2] * 8 and mine["4"].versions.tolist() == [2] * 12
    for id, completion in theirs.items():
        alike(mine[id], completion)


def test_a_tensor_that_was_not_loaded_is_seen(engine, weights):
    held = dict(engine.loaded_weights())
    assert all(torch.equal(held[name], weight) for name, weight in weights)
    engine.model.model.layers[1].self_attn.qkv_proj.weight.data[3, 5] += 1e-3
    wrong = [name for name, weight in weights if not torch.equal(dict(engine.loaded_weights())[name], weight)]
    assert wrong == ["model.layers.1.self_attn.q_proj.weight"]


def test_lost_buffers_are_found_before_the_next_token(engine):
    with engine.awake():
        run(engine, ask("a"))
    name, table = next((name, buffer) for name, buffer in engine.model.named_buffers() if "cos_sin" in name)
    kept = table.clone()
    table.zero_()
    with engine.awake(), pytest.raises(RunFailed, match=f"lost {name}"):
        engine.add(ask("a"))
    table.copy_(kept)
    engine.lost = ""


def test_a_flush_that_sglang_refuses_is_no_load(engine, weights, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "flush_cache", lambda empty_cache: False)
    with pytest.raises(RunFailed, match="kept keys and values older than version 2"):
        engine.load(weights, version=2)
    with pytest.raises(AssertionError, match="no weights"):
        engine.add(ask("a"))


def test_stale_keys_are_found(engine, other_weights, monkeypatch):
    """Weights loaded without a flush: the key of the cache alone is enough, and without it the first answer fails."""
    prompt = range(40)
    first = run(engine, ask("a", prompt, seed=4))["a"]
    monkeypatch.setattr(engine.scheduler, "flush_cache", lambda empty_cache: True)
    engine.load(other_weights, version=2)
    assert run(engine, ask("a", prompt, seed=4))["a"].logprobs[0] != first.logprobs[0]
    monkeypatch.setattr(type(engine), "_cache_key", lambda self, cache: "version 2")
    engine.load(other_weights, version=3)
    with pytest.raises(RunFailed, match="older than version 3"):
        run(engine, ask("a", prompt))
    engine.abort(["a"])
    drain(engine)


def test_sleep_and_wake_in_order(monkeypatch):
    """Of the device's memory: on a machine without one, in which order SGLang is asked."""
    from spmd_rl.engine.sglang.engine import SglangEngine

    calls = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(sampler=None, model=torch.nn.Module())),
        weight_updater=SimpleNamespace(
            release_memory_occupation=lambda request: calls.append(("release", *request.tags)),
            resume_memory_occupation=lambda request: calls.append(("resume", *request.tags)),
        ),
        turn=lambda: None,
        max_req_len=64,
        max_total_num_tokens=64,
        max_running_requests=4,
    )
    engine = SglangEngine(scheduler, {}, None, sleeps=True)
    assert calls == [("release", "kv_cache"), ("release", "weights")]
    for _ in range(2):
        with engine.awake():
            assert calls[2:] == [("resume", "weights")]
    engine.sleep()
    assert calls[3:] == [("release", "weights")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_prefil_tokens", "has no such argument"),
        ("tp_size", "decided by engine.tp"),
        ("disable_overlap_schedule", "must be True, or a batch would be scheduled before"),
        ("random_seed", "must be 0, which the engine needs"),
    ],
)
def test_an_argument_that_is_not_the_users_to_choose_is_refused(name, words):
    from sglang.srt.server_args import ServerArgs

    from spmd_rl.engine.guest import check_args
    from spmd_rl.engine.sglang.start import ALWAYS, OURS, REASONS

    check_args({"max_prefill_tokens": 512, "kv_cache_dtype": "fp8_e5m2"}, ServerArgs, OURS, ALWAYS)
    with pytest.raises(UserError, match=rf"engine\.args\.{name}: .*{words}"):
        check_args({name: 1}, ServerArgs, OURS, ALWAYS, REASONS)


def test_another_version_is_refused(path, monkeypatch):
    monkeypatch.setattr("spmd_rl.config.packages.installed", lambda name: "0.5.24")
    with pytest.raises(UserError, match="SGLang 0.5.24 is not sglang==0.5.23"):
        with sglang_engine(path):
            pass
