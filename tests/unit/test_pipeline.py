"""Pipelines: the order of a stage's steps and what it costs, how layers are dealt, and what a cut leaves of a model."""

from collections import defaultdict, deque
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.base.errors import UserError
from spmd_rl.config.ranks import deal_layers
from spmd_rl.model.build import build_model
from spmd_rl.train.fsdp2.stages import cut
from spmd_rl.train.pipeline import Step, forward_only, most_in_flight, one_forward_one_backward
from tests.models import EXPERTS, tiny

SHAPES = {"num_stages": st.integers(1, 8), "num_chunks": st.integers(1, 5), "count": st.integers(0, 24)}
FORWARD, BACKWARD = 1, 2
"""Time units that a chunk takes for a micro-batch."""


@settings(deadline=None)
@given(stage=st.integers(0, 7), **SHAPES)
def test_each_microbatch_goes_through_each_chunk_and_back_once_and_few_are_in_flight(
    num_stages, stage, num_chunks, count
) -> None:
    stage %= num_stages
    steps, in_flight = list(one_forward_one_backward(stage, num_stages, count, num_chunks)), 0
    for chunk in range(num_chunks):
        for way in (True, False):
            assert [i for i, is_forward, at in steps if (is_forward, at) == (way, chunk)] == list(range(count))
    most = most_in_flight(stage, num_stages, count, num_chunks)
    for _, is_forward, _ in steps:
        in_flight += 1 if is_forward else -1
        assert 0 <= in_flight <= most
    if num_chunks == 1:
        assert most == num_stages - stage
    else:  # of a whole stage's activations 1 + 1 / num_chunks times what 1F1B's first stage keeps, or twice as much
        assert most < num_stages * (2 * num_chunks if count % num_stages else num_chunks + 1)
    forwards = [step for step in steps if step.is_forward]
    assert list(forward_only(num_stages, count, num_chunks)) == forwards


def played(num_stages: int, num_chunks: int, steps: list[list[Step]]) -> float:
    """Time until all stages are done with their steps, in units, where messages take none.

    A send never waits. A receive gets what comes next on its way: messages of two ranks that go one way, forward or
    back, and around the end or not, come in the order in which they were sent. Fails if stages wait for ever, or if a
    stage would take another message for the one that it wants.
    """
    ways: dict[tuple, deque] = defaultdict(deque)
    left, free = [deque(own) for own in steps], [0.0] * num_stages
    while any(left):
        moved = False
        for stage, own in enumerate(left):
            if not own:
                continue
            i, is_forward, chunk = own[0]
            place, ahead, last = chunk * num_stages + stage, 1 if is_forward else -1, num_stages * num_chunks - 1
            arrived = 0.0
            if 0 <= place - ahead <= last:
                way = ways[(place - ahead) % num_stages, stage, is_forward, not 0 <= stage - ahead < num_stages]
                if not way:
                    continue
                arrived, *message = way.popleft()
                assert message == [i, place]
            own.popleft()
            free[stage] = max(free[stage], arrived) + (FORWARD if is_forward else BACKWARD)
            if 0 <= place + ahead <= last:
                to = (place + ahead) % num_stages
                around = not 0 <= stage + ahead < num_stages
                ways[stage, to, is_forward, around].append((free[stage], i, place + ahead))
            moved = True
        assert moved, "all stages wait"
    assert not any(ways.values()), "sent and never received"
    return max(free)


@settings(deadline=None)
@given(**SHAPES)
def test_no_stage_waits_for_ever_and_chunks_wait_a_vpp_th(num_stages: int, num_chunks: int, count: int) -> None:
    """What is lost at the start and at the end is one chunk's work per other stage, whatever the number of
    micro-batches, if there are as many as stages; never more than 1F1B loses.
    """
    steps = [list(one_forward_one_backward(stage, num_stages, count, num_chunks)) for stage in range(num_stages)]
    lost = played(num_stages, num_chunks, steps) - count * num_chunks * (FORWARD + BACKWARD)
    of_a_chunk = (num_stages - 1) * (FORWARD + BACKWARD)
    if count >= num_stages or (count and num_chunks == 1):
        assert lost == of_a_chunk
    assert lost <= of_a_chunk * num_chunks
    played(num_stages, num_chunks, [list(forward_only(num_stages, count, num_chunks))] * num_stages)


@settings(deadline=None)
@given(num_stages=st.integers(1, 16), vpp=st.integers(1, 4), more=st.integers(0, 80))
def test_layers_are_dealt_in_order_and_evenly(num_stages: int, vpp: int, more: int) -> None:
    vpp = vpp if num_stages > 1 else 1
    num_layers = num_stages * vpp + more
    dealt = deal_layers("train", num_layers, num_stages, vpp)
    assert len(dealt) == num_stages * vpp
    assert [layer for mine in dealt for layer in mine] == list(range(num_layers))
    costs = [len(mine) + (mine.start == 0) + (mine.stop == num_layers) for mine in dealt]
    assert min(map(len, dealt)) >= 1
    assert max(costs) <= max(2, min(costs) + 1) or num_stages == 1


def test_more_stages_than_layers_are_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"critic.train.pp: 3 stages cannot share 2 layers; at most 2"):
        deal_layers("critic.train", 2, 3)


def test_chunks_need_layers_and_other_stages() -> None:
    with pytest.raises(UserError, match=r"train.vpp: 6 chunks, 3 for each of 2 stages, cannot share 5 layers; at most"):
        deal_layers("train", 5, 2, 3)
    with pytest.raises(UserError, match=r"critic.train.vpp: 2 chunks a stage need several stages, critic.train.pp > 1"):
        deal_layers("critic.train", 5, 1, 2)


def stage_of(path, stage: int, num_stages: int, vpp: int = 1):
    """A model's part in one stage, where the parameters lie, and the stage's chunks."""
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    layout = SimpleNamespace(rank=lambda axis: stage, size=lambda axis: num_stages, key="train")
    return model, *cut(model, layout, vpp)


KINDS = [("llama", {"tie": True}), ("llama", {}), ("qwen2", {}), ("qwen3_moe", EXPERTS["qwen3_moe"])]


@pytest.mark.parametrize(("kind", "sizes"), KINDS)
@pytest.mark.parametrize(("num_stages", "vpp"), [(2, 1), (3, 1), (2, 2)])
def test_stages_together_compute_what_the_model_does(kind, sizes, num_stages, vpp, tmp_path) -> None:
    path = tiny(kind, tmp_path, num_hidden_layers=4, **sizes)
    whole = build_model(path, torch.float32, "cpu", attention="sdpa")
    names = dict(whole.named_parameters())
    ids = torch.arange(10)[None]
    hidden, counted, stages = {"input_ids": ids}, dict.fromkeys(names, 0), []
    for stage in range(num_stages):
        model, held, chunks = stage_of(path, stage, num_stages, vpp)
        stages.append((model, chunks))
        assert list(held) == list(names) and all(held[name].shape == p.shape for name, p in names.items())
        mine = [name for name, _ in model.named_parameters()]
        assert mine == [name for name in names if stage in held[name].stages]
        for name in mine:
            counted[name] += 1
    for chunk, (model, chunks) in product(range(vpp), stages):
        chunks.current, held_before = chunk, [name for name, _ in model.named_parameters()]
        hidden = {"inputs_embeds": model(**hidden, position_ids=ids).logits}
        assert held_before == [name for name, _ in model.named_parameters()]
    assert torch.equal(hidden["inputs_embeds"], whole(input_ids=ids).logits)
    tied = {"model.embed_tokens.weight"} if sizes.get("tie") else set()
    assert {name for name, count in counted.items() if count == 2} == tied and set(counted.values()) <= {1, 2}


def test_a_model_that_adds_positions_to_its_embeddings_is_refused_by_name(tmp_path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=16))
    layout = SimpleNamespace(rank=lambda axis: 0, size=lambda axis: 2, key="train")
    with pytest.raises(UserError, match=r"train.pp: GPT2LMHeadModel has .*wpe.weight.* outside its layers; must be 1"):
        cut(model, layout)


def test_a_model_whose_stages_would_each_scale_what_they_pass_on_is_refused_by_name(tmp_path) -> None:
    model = build_model(tiny("granite", tmp_path, logits_scaling=8.0), torch.float32, "cpu")
    layout = SimpleNamespace(rank=lambda axis: 0, size=lambda axis: 2, key="train")
    with pytest.raises(UserError, match=r"train.pp: GraniteForCausalLM scales its hidden states; must be 1"):
        cut(model, layout)
