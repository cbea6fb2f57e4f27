"""Pipelines: the order of a stage's steps, how layers are dealt, and what a cut leaves of a model."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.ranks import deal_layers
from spmd_rl.errors import UserError
from spmd_rl.model.build import build_model
from spmd_rl.train.fsdp2.stages import cut
from spmd_rl.train.pipeline import forward_only, one_forward_one_backward
from tests.models import EXPERTS, tiny


@settings(deadline=None)
@given(num_stages=st.integers(1, 8), stage=st.integers(0, 7), count=st.integers(0, 20))
def test_each_microbatch_goes_forward_and_back_once_and_few_are_in_flight(num_stages, stage, count) -> None:
    stage %= num_stages
    steps, in_flight = list(one_forward_one_backward(stage, num_stages, count)), 0
    assert [i for i, is_forward in steps if is_forward] == list(range(count))
    assert [i for i, is_forward in steps if not is_forward] == list(range(count))
    for i, is_forward in steps:
        in_flight += 1 if is_forward else -1
        assert 0 <= in_flight <= num_stages - stage
        assert is_forward or steps.index((i, True)) < steps.index((i, False))
    assert list(forward_only(count)) == [(i, True) for i in range(count)]


@settings(deadline=None)
@given(num_stages=st.integers(1, 8), count=st.integers(1, 20))
def test_no_stage_waits_for_another_one_for_ever(num_stages: int, count: int) -> None:
    """A step is done once what it receives has been sent; sends do not wait. In as few rounds as 1F1B takes."""
    left = [list(one_forward_one_backward(stage, num_stages, count)) for stage in range(num_stages)]
    done: set[tuple[int, int, bool]] = set()
    rounds = 0
    while any(left):
        ready = []
        for stage, steps in enumerate(left):
            if steps:
                (i, is_forward), source = steps[0], stage + (-1 if steps[0].is_forward else 1)
                if not 0 <= source < num_stages or (source, i, is_forward) in done:
                    ready.append((stage, i, is_forward))
        assert ready, "all stages wait"
        for stage, i, is_forward in ready:
            left[stage].pop(0)
            done.add((stage, i, is_forward))
        rounds += 1
    assert rounds <= 2 * (count + num_stages - 1)


@settings(deadline=None)
@given(num_stages=st.integers(1, 16), more=st.integers(0, 80))
def test_layers_are_dealt_in_order_and_evenly(num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    dealt = deal_layers("train", num_layers, num_stages)
    assert [layer for mine in dealt for layer in mine] == list(range(num_layers))
    costs = [len(mine) + (mine.start == 0) + (mine.stop == num_layers) for mine in dealt]
    assert min(map(len, dealt)) >= 1
    assert max(costs) <= max(2, min(costs) + 1) or num_stages == 1


def test_more_stages_than_layers_are_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"critic.train.pp: 3 stages cannot share 2 layers; at most 2"):
        deal_layers("critic.train", 2, 3)


def stage_of(path, stage: int, num_stages: int):
    """A model's part in one stage, and where the parameters lie."""
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    layout = SimpleNamespace(rank=lambda axis: stage, size=lambda axis: num_stages, key="train")
    return model, cut(model, layout)


KINDS = [("llama", {"tie": True}), ("llama", {}), ("qwen2", {}), ("qwen3_moe", EXPERTS["qwen3_moe"])]


@pytest.mark.parametrize(("kind", "sizes"), KINDS)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_together_compute_what_the_model_does(kind, sizes, num_stages, tmp_path) -> None:
    path = tiny(kind, tmp_path, num_hidden_layers=4, **sizes)
    whole = build_model(path, torch.float32, "cpu", attention="sdpa")
    names = dict(whole.named_parameters())
    ids = torch.arange(10)[None]
    hidden, counted = {"input_ids": ids}, dict.fromkeys(names, 0)
    for stage in range(num_stages):
        model, held = stage_of(path, stage, num_stages)
        assert list(held) == list(names) and all(held[name].shape == p.shape for name, p in names.items())
        mine = [name for name, _ in model.named_parameters()]
        assert mine == [name for name in names if stage in held[name].stages]
        for name in mine:
            counted[name] += 1
        hidden = {"inputs_embeds": model(**hidden, position_ids=ids).logits}
    assert torch.equal(hidden["inputs_embeds"], whole(input_ids=ids).logits)
    tied = {"model.embed_tokens.weight"} if sizes.get("tie") else set()
    assert {name for name, count in counted.items() if count == 2} == tied and set(counted.values()) <= {1, 2}


def test_a_model_that_adds_positions_to_its_embeddings_is_refused_by_name(tmp_path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=16))
    layout = SimpleNamespace(rank=lambda axis: 0, size=lambda axis: 2, key="train")
    with pytest.raises(UserError, match=r"train.pp: GPT2LMHeadModel has .*wpe.weight.* beside its layers; must be 1"):
        cut(model, layout)


def test_a_model_whose_stages_would_each_scale_what_they_pass_on_is_refused_by_name(tmp_path) -> None:
    model = build_model(tiny("granite", tmp_path, logits_scaling=8.0), torch.float32, "cpu")
    layout = SimpleNamespace(rank=lambda axis: 0, size=lambda axis: 2, key="train")
    with pytest.raises(UserError, match=r"train.pp: GraniteForCausalLM scales its hidden states; must be 1"):
        cut(model, layout)
