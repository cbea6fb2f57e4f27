"""Tensor parallelism beyond the parity test: the shared-out vocabulary, few key-value heads, what is held and sent."""

import json
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.constraint import Allowed
from spmd_rl.model.load import local, share
from spmd_rl.model.logprobs import Candidates, VocabularyShare, token_logprobs
from spmd_rl.train import build_role
from spmd_rl.train.fsdp2.tensor_parallel import parallelize
from tests.dist.harness import run_ranks
from tests.dist.test_train_parity import gradients
from tests.models import tiny
from tests.training import TEMPERATURE, backend, global_batch, loss, share_of


def vocabulary(world: World, cut: str, chunk: int) -> dict[str, float]:
    """Largest differences of results and gradients from those of one rank with the whole vocabulary, in float64."""
    from spmd_rl.model import logprobs

    logprobs.CHUNK = chunk
    generator = torch.Generator().manual_seed(0)
    hidden, whole = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (11, 7 * world.size - 2))
    targets = torch.randint(0, len(whole), (11,), generator=generator)
    rows = torch.arange(10).repeat_interleave(2)  # the last row keeps all tokens
    support = Candidates(rows, torch.stack([targets, (targets + 9) % len(whole)], 1)[:10].flatten()) if cut else None
    if cut == "masked":
        words = torch.zeros(11, 1, dtype=torch.int32)
        words[rows, 0] = (1 << support.ids.view(10, 2)).sum(1).int().repeat_interleave(2)
        words[10] = -1
        support = Allowed(words, torch.arange(11))
    seeds = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    own = share(slice(0, len(whole)), world.size, world.rank)

    def run(weight, vocabulary):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = token_logprobs(*leaves, targets, 0.7, support, vocabulary)
        (found[0] @ seeds[0] + found[1] @ seeds[1]).backward()
        return *(x.detach() for x in found), *(leaf.grad for leaf in leaves)

    wanted = run(whole, None)
    group = world.process_group("vocabulary")
    got = list(run(whole[own], VocabularyShare(own.start, group)))
    torch.distributed.all_reduce(got[2], group=group)
    parts = dict(zip(("logprobs", "entropy", "hidden"), zip(got, wanted, strict=False), strict=False))
    parts["weight"] = got[3], wanted[3][own]
    return {name: float((a - b).abs().max()) for name, (a, b) in parts.items()}


@pytest.mark.parametrize(("size", "cut", "chunk"), [(2, "", 2**21), (3, "listed", 30), (3, "masked", 30)])
def test_a_shared_out_vocabulary_gives_the_logprobs_of_the_whole(size: int, cut: str, chunk: int) -> None:
    for errors in run_ranks(size, vocabulary, cut, chunk):
        assert max(errors.values()) < 1e-12, errors


def few_heads(world: World, path: str) -> dict[str, float]:
    return gradients(world, backend, path, {"tp": world.size}, "float64", ("dealt", 4096, "selective"))


PAD = 7
"""Within the first rank's part of the vocabulary; tokens of that number have no gradient from the embedding."""


def test_ranks_share_a_key_value_head_where_there_are_fewer(tmp_path) -> None:
    path = tiny("qwen2", tmp_path, num_attention_heads=4, num_key_value_heads=2, vocab_size=263, pad_token_id=PAD)
    assert PAD in global_batch().token_ids
    for errors in run_ranks(4, few_heads, str(path), timeout=200):
        worst = max(errors, key=errors.get)
        assert errors[worst] < 1e-10, (worst, errors[worst])


class Traffic(TorchDispatchMode):
    """Counts collectives over gloo, by kind and the elements of the largest tensor that they take or give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            sizes = [x.numel() for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.seen[f"{func._schema.name.removeprefix('c10d::').strip('_')} {max(sizes, default=0)}"] += 1
        return func(*args, **kwargs or {})


def held_and_sent(world: World, path: str) -> dict[str, int]:
    """Bytes read and held by this rank, and the collectives of an update."""
    cfg = RlvrConfig(policy=PolicyConfig(model=path, dtype="float32"), train=TrainConfig(tp=world.size))
    role = build_role(cfg.role("policy"), world)
    (line,) = [line for line in map(json.loads, world.journal.path.open()) if line["event"] == "loaded"]
    held = {part: sum(local(t).nbytes for t in tensors.values()) for part, tensors in role.model.state_dict().items()}
    with Traffic() as traffic:
        role.update(share_of(role, "dealt", global_batch()), loss, TEMPERATURE)
    return {"read": line["bytes"], **held, **traffic.seen}


def test_no_rank_reads_holds_or_sends_more_than_its_share(tmp_path) -> None:
    path = tiny("llama", tmp_path, tie=True, vocab_size=4001, intermediate_size=96)
    model, row, num_layers = (path / "model.safetensors").stat().st_size, 256 * 64, 2
    for facts in run_ranks(2, held_and_sent, str(path), per_machine=1):  # without memory that neighbours share
        assert facts.pop("read") <= 1.1 * model / 2
        assert facts.pop("model") <= 1.1 * model / 2
        assert facts.pop("optimizer") <= 1.1 * 2 * model / 2
        # Into each block of layers and out of it the hidden states of all tokens travel once, as do those of embedding
        # and head, and each of them once more on the way back.
        assert facts.pop(f"allgather_base {row}") == 2 * (2 * num_layers + 1)
        assert facts.pop(f"reduce_scatter_base {row}") == 2 * (2 * num_layers + 1)
        assert all(int(kind.split()[1]) * count < row for kind, count in facts.items()), facts


REFUSED = {
    "phi3": "uses 'colwise_gather_output', which is not supported",
    "deepseek_v3": "leaves out model.layers.0.self_attn, which must see all tokens",
    "stablelm": "does not cover its layers",
}
"""What is wrong with transformers' plan of some families."""
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def refusals(world: World) -> dict[str, str]:
    found = {}
    for kind in REFUSED:
        config = AutoConfig.for_model(kind, **SMALL, num_hidden_layers=1, vocab_size=260, pad_token_id=0)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        try:
            parallelize(model, Layout(world, tp=2))
        except UserError as error:
            found[kind] = str(error)
    return found


def test_plans_that_cannot_be_carried_out_are_refused_by_name() -> None:
    for told in run_ranks(2, refusals):
        for kind, reason in REFUSED.items():
            assert told[kind].startswith("train.tp: transformers' plan for ") and reason in told[kind]
