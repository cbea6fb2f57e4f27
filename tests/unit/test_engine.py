"""The native engine as a machine: admission, bounds, stops, aborts, versions, determinism."""

from array import array
from dataclasses import replace

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl import engine as engines
from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import EngineConfig, RlvrConfig
from spmd_rl.engine.base import EngineCounts
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.kv import BLOCK, blocks_for
from spmd_rl.engine.native.module import empty_module
from spmd_rl.types import Completion, Request
from tests.models import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def weights(path):
    return list(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())


@pytest.fixture
def make(path, weights):
    """An engine with its weights loaded."""

    def build(max_running=4, kv_tokens=512, version=1, dtype=torch.float32) -> NativeEngine:
        engine = NativeEngine(empty_module(path, dtype), max_running, kv_tokens)
        engine.load(weights, version)
        return engine

    return build


def ask(id: str, prompt=(1, 2, 3), new=8, temperature=1.0, seed=0, order=(), stop=()) -> Request:
    return Request(id, array("i", prompt), new, temperature, seed, order, stop)


def drain(engine: NativeEngine) -> dict[str, Completion]:
    done = {}
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
    return done


def run(engine: NativeEngine, *requests: Request) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    return drain(engine)


def test_kv_budget_below_demand_waits_and_is_never_exceeded(make):
    engine = make(max_running=16, kv_tokens=128)
    requests = [ask(f"{i}", prompt=range(i, i + 20), new=15, seed=i) for i in range(12)]
    for request in requests:
        engine.add(request)
    done, most = {}, 0
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
        most = max(most, engine.pool.num_used)
    assert len(done) == 12 and 0 < most <= engine.pool.peak <= engine.pool.num_blocks == 128 // BLOCK
    assert engine.pool.num_used == 0
    roomy = run(make(max_running=16, kv_tokens=2048), *requests)
    assert {id: c.token_ids for id, c in done.items()} == {id: c.token_ids for id, c in roomy.items()}


def test_max_running_is_the_bound(make):
    engine = make(max_running=3)
    for i in range(7):
        engine.add(ask(f"{i}", new=2, seed=i))
    assert [len(engine.step()) for _ in range(6)] == [0, 3, 0, 3, 0, 1]


def test_a_group_stores_its_prompt_once(make):
    prompt = range(4 * BLOCK + 3)
    engine = make(max_running=8, kv_tokens=1024)
    for i in range(8):
        engine.add(ask(f"{i}", prompt=prompt, new=BLOCK, seed=i))
    engine.step()
    # four full blocks shared, the rest of the prompt and the answer in blocks of each one's own
    assert engine.pool.num_used == 4 + 8 * blocks_for(2 + BLOCK)
    drain(engine)
    assert engine.pool.num_used == 0


def test_waiting_requests_are_admitted_in_order(make):
    engine = make(max_running=1)
    for i, order in enumerate([(2, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 0), (0, 0, 1)]):
        engine.add(ask(f"{i}", new=1, order=order))
    assert [engine.step()[0].id for _ in range(5)] == ["3", "4", "1", "2", "0"]


def test_tokens_do_not_depend_on_the_company(make):
    requests = [ask(f"{i}", prompt=range(i + 1), new=10 + i, seed=i * 7919) for i in range(10)]
    alone = {}
    for request in requests:
        alone |= run(make(), request)
    together = run(make(max_running=10, kv_tokens=2048), *requests)
    late = run(make(max_running=3, kv_tokens=256), *reversed(requests))
    for id, completion in alone.items():
        assert completion.token_ids == together[id].token_ids == late[id].token_ids
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), torch.tensor(together[id].logprobs), atol=1e-5, rtol=0
        )


def turns(engine: NativeEngine, lead: int, num: int = 4) -> list[Completion]:
    """An agent's turns: each prompt is all before it, and an observation."""
    history, done = array("i", (i * lead % 256 for i in range(37))), []
    for turn in range(num):
        done.append(run(engine, ask(f"{lead}/{turn}", prompt=history, new=9, seed=turn))[f"{lead}/{turn}"])
        history = history + done[-1].token_ids + array("i", range(lead, lead + 11))
    return done


def test_a_turn_computes_what_it_adds(make):
    engine = make()
    turns(engine, 5)
    prompts = [37 + turn * (9 + 11) for turn in range(4)]
    # of each turn all but its last token is stored; less than a block of it is computed again
    cached = [(n - 11 - 1) // BLOCK * BLOCK for n in prompts[1:]]
    assert engine.token_counts == EngineCounts(sum(prompts), sum(cached))


def test_a_group_computes_its_prompt_once(make):
    engine = make(max_running=8)
    run(engine, *[ask(f"{i}", prompt=range(4 * BLOCK + 2), seed=i) for i in range(6)])
    assert engine.token_counts == EngineCounts(6 * (4 * BLOCK + 2), 5 * 4 * BLOCK)
    run(engine, ask("the last token is fed", prompt=range(4 * BLOCK)))
    assert engine.token_counts.cached == 5 * 4 * BLOCK + 3 * BLOCK


def test_caches_of_two_names_share_no_prompt(make):
    engine = make()
    cached = []
    for cache in ("val", "train", "train", "val"):
        engine.token_counts.cached = 0
        run(engine, msgspec.structs.replace(ask("a", prompt=range(40)), cache=cache))
        cached.append(engine.token_counts.cached > 0)
    assert cached == [False, False, True, True]


def test_other_weights_and_sleep_forget_what_was_computed(make, weights):
    engine = make()
    for forget in (lambda: engine.load(weights, 2), engine.pool.sleep):
        first = run(engine, ask("a", prompt=range(40)))
        forget()
        engine.pool.wake()
        engine.token_counts.cached = 0
        assert run(engine, ask("a", prompt=range(40)))["a"].token_ids == first["a"].token_ids
        assert engine.token_counts.cached == 0


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="what MKL promises of its products")
def test_bits_do_not_depend_on_the_cache_the_company_or_the_pieces(tmp_path, monkeypatch):
    """A logprob is a function of the tokens before it: computed at once, token by token, alone, evicted or not."""
    wide = tiny("llama", tmp_path, hidden_size=576, intermediate_size=512, num_hidden_layers=1)
    weights = list(AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).named_parameters())

    def make(max_running=4, kv_tokens=512) -> NativeEngine:
        engine = NativeEngine(empty_module(wide, torch.float32), max_running, kv_tokens)
        engine.load(weights, 1)
        return engine

    cached = [turns(make(), lead, 2) for lead in (3, 5)]
    evicting = make(kv_tokens=92)
    assert [turns(evicting, lead, 2) for lead in (3, 5)] == cached
    crowd = [ask(f"{n}", prompt=[i * n % 256 for i in range(n)], new=4, seed=n) for n in (30, 200, 300)]
    engine = make(max_running=8, kv_tokens=1024)
    for request in crowd:
        engine.add(request)
    assert turns(engine, 3, 2) == cached[0]
    together = run(make(max_running=8, kv_tokens=1024), *crowd)
    monkeypatch.setattr("spmd_rl.engine.native.engine.QUERIES", 60)
    monkeypatch.setattr("spmd_rl.engine.native.engine.BATCH_TOKENS", 20)
    assert {request.id: run(make(), request)[request.id] for request in crowd} == together
    second = array("i", (i * 3 % 256 for i in range(37))) + cached[0][0].token_ids + array("i", range(3, 14))
    assert run(make(), ask("3/1", prompt=second, new=9, seed=1))["3/1"] == cached[0][1], "without what was cached"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_adds_give_bitwise_the_same(make, dtype):
    requests = [ask(f"{i}", prompt=range(i % 3, 30), new=5 + i, seed=i) for i in range(9)]
    first, second = (run(make(dtype=dtype), *requests) for _ in range(2))
    assert first == second
    engine = make(dtype=dtype)
    assert run(engine, *requests) == first and run(engine, *requests) == first


def test_seeds_and_temperature_decide(make):
    done = run(
        make(max_running=8),
        ask("a", seed=1),
        ask("same", seed=1),
        ask("other", seed=2),
        ask("cold", seed=1, temperature=1e-4),
        ask("greedy", seed=5, temperature=0.0),
    )
    assert done["a"].token_ids == done["same"].token_ids != done["other"].token_ids
    assert done["cold"].token_ids == done["greedy"].token_ids
    assert max(done["greedy"].logprobs) < -1.0 and min(done["cold"].logprobs) > -1e-3


def test_a_prompt_may_be_continued_and_noise_counts_from_the_request(make):
    """Token t is drawn from (seed, t) of its own request, whatever the prompt is made of."""
    whole = run(make(), ask("a", prompt=(1, 2, 3), new=6, seed=4, temperature=0.0))["a"]
    tail = run(make(), ask("b", prompt=(1, 2, 3, *whole.token_ids[:3]), new=3, seed=9, temperature=0.0))["b"]
    assert whole.token_ids[3:] == tail.token_ids


def test_abort_gives_what_there_is(make):
    engine = make(max_running=2)
    for i in range(4):
        engine.add(ask(f"{i}", new=10, seed=i, order=(i,)))
    assert engine.step() == [] and engine.step() == []
    engine.abort(["0", "3", "never heard of"])
    assert engine.num_unfinished == 4
    ended = {completion.id: completion for completion in engine.step()}
    assert {id: (c.finish_reason, len(c.token_ids)) for id, c in ended.items()} == {
        "0": ("abort", 2),
        "3": ("abort", 0),
    }
    rest = drain(engine)
    assert {id: len(c.token_ids) for id, c in rest.items()} == {"1": 10, "2": 10}
    assert rest == run(make(), ask("1", new=10, seed=1), ask("2", new=10, seed=2))
    assert engine.pool.num_used == 0


def test_abort_of_all_needs_one_step(make):
    engine = make()
    engine.add(ask("a"))
    engine.abort(["a"])
    assert [c.finish_reason for c in engine.step()] == ["abort"] and engine.num_unfinished == 0
    assert engine.step() == []


def test_an_id_may_come_again_only_when_it_has_ended(make):
    engine = make()
    engine.add(ask("a"))
    with pytest.raises(AssertionError, match="under way"):
        engine.add(ask("a"))
    drain(engine)
    engine.add(ask("a"))


def test_versions_are_stamped_and_a_load_leaves_nothing_behind(make, weights):
    engine = make(version=7)
    old = run(engine, ask("a", prompt=range(40), temperature=0.0))["a"]
    assert set(old.versions) == {7}
    scaled = [(name, weight * 1.5) for name, weight in weights]
    engine.load(scaled, version=8)
    new = run(engine, ask("a", prompt=range(40), temperature=0.0))["a"]
    assert set(new.versions) == {8}
    other = make()
    other.load(scaled, version=8)
    assert run(other, ask("a", prompt=range(40), temperature=0.0))["a"] == new != old


def test_no_request_before_weights(path, weights):
    engine = NativeEngine(empty_module(path, torch.float32), 4, 512)
    with pytest.raises(AssertionError, match="no weights"):
        engine.add(ask("a"))


def test_requests_under_way_go_on_with_new_weights_and_their_old_keys(make, weights):
    """Nobody else finds these keys: neither while they are in use nor afterwards."""
    scaled = [(name, weight * 1.5) for name, weight in weights]
    engine, plain, new = make(version=7), make(version=7), make()
    new.load(scaled, version=8)
    first = ask("a", prompt=range(40), temperature=0.0)
    for one in (engine, plain):
        one.add(first)
        assert not one.step()
    engine.load(scaled, version=8)
    engine.add(ask("b", prompt=range(40), temperature=0.0))
    done = drain(engine)
    assert list(done["a"].versions) == [7] + [8] * (len(done["a"].token_ids) - 1)
    assert done["a"].token_ids[0] == drain(plain)["a"].token_ids[0]
    again = run(engine, ask("c", prompt=range(40), temperature=0.0))["c"]
    fresh = run(new, ask("c", prompt=range(40), temperature=0.0))["c"]
    assert again == fresh and done["b"].token_ids == fresh.token_ids and done["b"].logprobs == fresh.logprobs


def test_weights_are_cast_to_the_engines_dtype(make, weights):
    engine = make(dtype=torch.bfloat16)
    for (name, given), (held_name, held) in zip(weights, engine.loaded_weights(), strict=True):
        assert name == held_name and torch.equal(held, given.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("long", prompt=range(200), new=400), "600 tokens exceed 512"),
        (ask("empty", prompt=()), "at least one"),
        (ask("none", new=0), "at least one"),
        (ask("hot", temperature=-1.0), "negative temperature"),
    ],
)
def test_bad_requests_are_refused(make, request_, words):
    engine = make()
    with pytest.raises(ValueError, match=words):
        engine.add(request_)
    assert engine.num_unfinished == 0


def test_the_longest_request_fits_alone(make):
    engine = make(kv_tokens=128)
    longest = engine.capacity.max_tokens
    assert longest == 128
    for length in (1, 2, BLOCK, BLOCK + 1, 16, 17, longest - 1):
        done = run(engine, ask("a", prompt=[i % 200 for i in range(length)], new=longest - length))
        assert len(done["a"].token_ids) == longest - length
    assert engine.pool.peak == engine.pool.num_blocks


def test_many_prompts_are_computed_in_bounded_forwards(make, monkeypatch):
    requests = [ask(f"{i}", prompt=range(i, 3 * i + 10), new=5, seed=i) for i in range(6)]
    whole = run(make(max_running=6, kv_tokens=1024), *requests)
    monkeypatch.setattr("spmd_rl.engine.native.engine.BATCH_TOKENS", 20)
    monkeypatch.setattr("spmd_rl.engine.native.engine.ROUND_FEW", 1)
    monkeypatch.setattr("spmd_rl.engine.native.engine.ROUND_MANY", 1)
    engine, sizes = make(max_running=6, kv_tokens=1024), []
    engine.model.model.embed_tokens.register_forward_hook(lambda module, args, out: sizes.append(out.shape[1]))
    assert {id: c.token_ids for id, c in run(engine, *requests).items()} == {id: c.token_ids for id, c in whole.items()}
    assert sizes[:7] == [10, 12, 14, 16, 18, 20, 6]  # each prompt alone; then one token of each


def test_long_and_short_rows_side_by_side(make):
    requests = [ask(f"{n}", prompt=[i % 200 for i in range(n)], new=12, seed=n) for n in (3, 120, 130, 300, 5)]
    together = run(make(max_running=5, kv_tokens=2048), *requests)
    for request in requests:
        assert run(make(), request)[request.id].token_ids == together[request.id].token_ids


def test_awake_nests_and_close_is_idempotent(make):
    engine = make()
    with engine.awake(), engine.awake():
        assert run(engine, ask("a"))
    engine.add(ask("b"))
    engine.close()
    engine.close()
    assert engine.num_unfinished == 0


def test_offload_frees_the_cache_and_keeps_the_weights(make):
    engine = make()
    engine.offloads = True  # as on an accelerator; here the host is the device, so weights move nowhere
    with engine.awake():
        first = run(engine, ask("a", prompt=range(40)))
        with engine.awake():
            pass
        assert engine.pool.data.numel() > 0
    assert engine.pool.data.numel() == 0
    with engine.awake():
        assert run(engine, ask("a", prompt=range(40))) == first


def test_build_by_name(path):
    cfg = RlvrConfig()
    cfg.policy = replace(cfg.policy, model=str(path), dtype="float32")
    world = type("World", (), {"device": torch.device("cpu"), "rank": 0})()
    built = engines.build(cfg.engine, cfg.policy, cfg.train.offload, world)
    assert built.capacity.max_running == 64 and built.capacity.max_tokens == 512
    with pytest.raises(UserError, match="'vlm'; known: native"):
        engines.build(EngineConfig(name="vlm"), cfg.policy, False, world)
    with pytest.raises(UserError, match="engine.tp: not supported by engine=native"):
        engines.build(EngineConfig(tp=2), cfg.policy, False, world)


def test_a_pool_too_small_for_anything(path):
    with pytest.raises(UserError, match="kv_tokens=3"):
        NativeEngine(empty_module(path, torch.float32), 4, 3)


def test_sliding_windows_are_refused_by_name(tmp_path):
    windowed = tiny("qwen2", tmp_path, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    with pytest.raises(UserError, match="sliding_attention"):
        empty_module(windowed, torch.float32)
