"""Our vLLM engine as a machine: admission, bounds, stops, aborts, versions, determinism; and its manners as a guest."""

import logging
import os
import random
import signal
from array import array

import msgspec
import numpy
import pytest
import torch
from msgspec.structs import replace

from spmd_rl.base.errors import RunFailed
from spmd_rl.model.build import build_model
from spmd_rl.types import Completion, Request
from tests.engines import VLLM_SIZES, needs_vllm, vllm_engine
from tests.models import tiny

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("model"), **VLLM_SIZES)


@pytest.fixture(scope="module")
def weights(path):
    return list(build_model(path, torch.float32, "cpu").named_parameters())


def state():
    """What vLLM would change in our process if it were let."""
    return {
        "environment": {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTEST"))},
        "threads": (torch.set_num_threads, torch.get_num_threads(), torch.get_float32_matmul_precision()),
        "generators": (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()),
        "handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        "logging": (logging.getLogRecordFactory(), logging.root.handlers[:], logging.root.manager.disable),
    }


@pytest.fixture(scope="module")
def started(path):
    """An engine without weights, and the process before and after it was started."""
    before = state()
    with vllm_engine(path, max_running=4, kv_tokens=1024) as engine:
        yield engine, before, state()


@pytest.fixture
def engine(started, weights):
    """The engine with its weights, as version 1."""
    engine = started[0]
    engine.load(weights, version=1)
    return engine


def ask(id: str, prompt=(1, 2, 3), new=8, temperature=1.0, seed=0, order=(), stop=()) -> Request:
    return Request(id, array("i", prompt), new, temperature, seed, order, stop)


def drain(engine) -> dict[str, Completion]:
    done = {}
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
    return done


def run(engine, *requests: Request) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    return drain(engine)


def test_a_guest_leaves_the_process_as_it_was(started):
    _, before, after = started
    before["environment"]["GLOO_SOCKET_IFNAME"] = "lo"  # the fixture's
    for what, value in before.items():
        assert after[what] == value, what


def test_no_request_before_the_first_load(started):
    if started[0].version is None:
        with pytest.raises(AssertionError, match="no weights"):
            started[0].add(ask("early"))


def test_the_same_adds_give_bitwise_the_same(engine, weights):
    requests = [ask(f"{i}", prompt=range(i % 3, 40), new=5 + i, seed=i, temperature=i % 3 / 2) for i in range(9)]
    first = run(engine, *requests)
    assert run(engine, *requests) == first, "served from the prefix cache"
    engine.load(weights, version=1)
    assert run(engine, *requests) == first


def test_caches_of_two_names_share_no_prompt(engine):
    prompt, cached = [i % 250 for i in range(300)], []
    for cache in ("val", "train", "train", "val"):
        engine.token_counts.cached = 0
        run(engine, msgspec.structs.replace(ask("a", prompt, new=2), cache=cache))
        cached.append(engine.token_counts.cached > 0)
    assert cached == [False, False, True, True]


def test_tokens_do_not_depend_on_the_company(engine):
    requests = [ask(f"{i}", prompt=range(i + 1), new=10 + i, seed=i * 7919) for i in range(10)]
    alone = {}
    for request in requests:
        alone |= run(engine, request)
    for id, completion in run(engine, *reversed(requests)).items():
        assert completion.token_ids == alone[id].token_ids
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), torch.tensor(alone[id].logprobs), atol=1e-5, rtol=0
        )


def test_admitted_in_the_order_of_add_up_to_max_running(engine):
    requests = [ask(f"{i}", new=2, seed=i, order=(9 - i,)) for i in range(10)]
    for request in requests:
        engine.add(request)
    assert [[c.id for c in engine.step()] for _ in range(6)] == [[], [*"0123"], [], [*"4567"], [], [*"89"]]


def test_aborted_requests_come_back_with_what_they_have(engine):
    for i in range(6):
        engine.add(ask(f"{i}", new=50, seed=i))
    whole = [engine.step() for _ in range(5)]
    assert whole == [[]] * 5
    engine.abort(["1", "5", "never", "1"])
    assert engine.num_unfinished == 6
    ended = {completion.id: completion for completion in engine.step()}
    assert {id: (len(c.token_ids), c.finish_reason) for id, c in ended.items()} == {
        "1": (5, "abort"),
        "5": (0, "abort"),
    }
    rest = drain(engine)
    assert rest.keys() == set("0234") and all(len(c.token_ids) == 50 for c in rest.values())
    engine.abort(["0"])
    assert engine.num_unfinished == 0 and engine.step() == []
    assert run(engine, ask("1", new=50, seed=1))["1"].token_ids[:5] == ended["1"].token_ids


def test_a_later_request_goes_on_where_an_aborted_one_stopped(engine):
    """A carried rollout: its own tokens become prompt, under a seed of its own."""
    engine.add(ask("a", new=30))
    for _ in range(5):
        engine.step()
    engine.abort(["a"])
    part = engine.step()[0]
    more = run(engine, ask("a", prompt=[1, 2, 3, *part.token_ids], new=25, temperature=0.0))["a"]
    again = run(engine, ask("a", prompt=[1, 2, 3, *part.token_ids], new=25, temperature=0.0, seed=9))["a"]
    assert more == again and len(more.token_ids) == 25


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("x", prompt=()), "at least one prompt token"),
        (ask("x", new=0), "one new token"),
        (ask("x", prompt=range(500), new=13), "513 tokens exceed 512"),
        (ask("x", temperature=0.001), "0.01 to 2"),
        (ask("x", temperature=2.5), "0.01 to 2"),
        (ask("x", temperature=-1.0), "0.01 to 2"),
    ],
)
def test_requests_that_are_refused(engine, request_, words):
    with pytest.raises(ValueError, match=words):
        engine.add(request_)
    assert engine.num_unfinished == 0


def test_a_request_as_long_as_the_engine_allows(engine):
    assert len(run(engine, ask("x", prompt=range(200), new=312))["x"].token_ids) == 312


def test_every_64_bit_seed_is_taken(engine):
    seeds = (0, 1, 2**63 - 1, 2**63, 2**64 - 1)
    done = run(engine, *(ask(f"{seed}", seed=seed) for seed in seeds))
    again = run(engine, *(ask(f"{seed}", seed=seed) for seed in seeds))
    assert done == again


def test_versions_and_no_load_under_way(engine, weights):
    assert set(run(engine, ask("a"))["a"].versions) == {1}
    engine.add(ask("a"))
    with pytest.raises(AssertionError, match="under way"):
        engine.load(weights, version=2)
    drain(engine)
    engine.load(weights, version=2)
    assert set(run(engine, ask("a"))["a"].versions) == {2}


def test_lost_buffers_are_found_before_the_next_token(engine, weights):
    with engine.awake():
        run(engine, ask("a"))
    table = next(buffer for name, buffer in engine.model.named_buffers() if "cos_sin" in name)
    kept = table.clone()
    table.zero_()
    with engine.awake(), pytest.raises(RunFailed, match="lost model.layers.0.self_attn.rotary_emb.cos_sin_cache"):
        engine.add(ask("a"))
    with pytest.raises(RunFailed, match="lost model.layers.0"):
        engine.load(weights, version=2)
    table.copy_(kept)
    engine.lost = ""


def test_a_stale_prefix_cache_is_found(engine, weights, monkeypatch):
    prompt = range(40)
    first = run(engine, ask("a", prompt=prompt, seed=4))["a"]
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
    engine.load([(name, weight * 1.1) for name, weight in weights], version=2)
    assert run(engine, ask("a", prompt=prompt, seed=4))["a"].token_ids != first.token_ids, "the salt alone is enough"
    add = engine.llm.add_request
    monkeypatch.setattr(
        engine.llm, "add_request", lambda id, prompt, *a, **k: add(id, prompt | {"cache_salt": "version 2 "}, *a, **k)
    )
    engine.load(weights, version=3)
    with pytest.raises(RunFailed, match="older than version 3"):
        run(engine, ask("a", prompt=prompt))
    engine.abort(["a"])
    drain(engine)


def test_many_loads_leave_no_memory_behind(engine, weights):
    import psutil

    process, sizes = psutil.Process(), []
    for version in range(60):
        engine.load(weights, version)
        sizes.append(process.memory_info().rss)
    assert sizes[-1] - sizes[20] < 8e6


def test_it_prints_nothing(engine, capfd):
    run(engine, ask("a"), replace(ask("b"), temperature=0.0))
    assert capfd.readouterr() == ("", "")
