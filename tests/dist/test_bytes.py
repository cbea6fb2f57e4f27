"""Bytes that each rank reads at start, holds, and sends in an update, counted for each axis of a layout."""

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmd_rl.config.schema import PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.distributed import World
from spmd_rl.model.load import local
from spmd_rl.train import build_role
from tests.dist.harness import run_ranks
from tests.dist.test_train_load import bytes_read
from tests.models import EXPERTS, tiny
from tests.training import TEMPERATURE, global_batch, loss, share_of

FLOAT = 4
"""Bytes of all numbers here."""
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, TOP_K = 4, 64, 4, 2, 16, 2
SIZES = {"num_hidden_layers": LAYERS, "vocab_size": 262}
MODELS = {"llama": ("llama", SIZES), "qwen3_moe": ("qwen3_moe", SIZES | EXPERTS["qwen3_moe"])}
LAYOUTS = [
    ("llama", {}),
    ("llama", {"tp": 2}),
    ("llama", {"cp": 2}),
    ("llama", {"pp": 2}),
    ("qwen3_moe", {"ep": 2}),
]
LARGE = [
    ("llama", {"cp": 2}),
    ("llama", {"pp": 2, "tp": 2}),
    ("llama", {"cp": 2, "tp": 2}),
    ("llama", {"pp": 2, "cp": 2}),
    ("qwen3_moe", {"pp": 2, "ep": 2}),
    ("qwen3_moe", {"ep": 4}),
]
"""Of four ranks."""


class Traffic(TorchDispatchMode):
    """Counts collectives over gloo: how many there are of a kind, and the bytes that this rank puts into them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind = func._schema.name.removeprefix("c10d::").strip("_")
            given = args[1] if "allgather" in kind or "scatter" in kind or "alltoall" in kind else args[0]
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            self.calls[kind] += 1
            self.bytes[kind] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **kwargs or {})


def counted(world: World, path: str, axes: dict[str, int], budget: int) -> dict:
    """What this rank reads, holds and sends; tokens that enter its model in all micro-batches."""
    cfg = RlvrConfig(policy=PolicyConfig(model=path, dtype="float32"))
    cfg.train = TrainConfig(tokens_per_microbatch=budget, **axes)
    role = build_role(cfg.role("policy"), world)
    held = {part: sum(local(t).nbytes for t in tensors.values()) for part, tensors in role.model.state_dict().items()}
    share = share_of(role, "dealt", global_batch())
    seen: list[int] = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[1]) if type(module).__name__.endswith("DecoderLayer") else None
    )
    with Traffic() as traffic:
        metrics = role.update(share, loss, TEMPERATURE)
    hook.remove()
    layers = LAYERS // role.layout.size("pp")
    facts = {"read": bytes_read(world)[-1], **held, "calls": traffic.calls, "sent": traffic.bytes}
    return facts | {"count": int(metrics["num_microbatches"]), "tokens": sum(seen) // layers}


def all_counted(world: World, paths: dict[str, str], layouts: list, budget: int) -> dict[str, dict]:
    return {f"{model} {axes}": counted(world, paths[model], axes, budget) for model, axes in layouts}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: str(tiny(kind, folder / name, **sizes)) for name, (kind, sizes) in MODELS.items()}


def stored_bytes(path: str) -> tuple[int, int]:
    """Of the whole model, and of its experts."""
    tensors = load_file(f"{path}/model.safetensors")
    return (
        sum(tensor.nbytes for tensor in tensors.values()),
        sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name),
    )


def assert_shares(found: list[dict[str, dict]], paths: dict[str, str], size: int) -> None:
    """No rank reads or holds above 1.1 of its share and a layer."""
    for key in found[0]:
        whole, _ = stored_bytes(paths[key.split()[0]])
        room = 1.1 * whole / size + whole / LAYERS * ("pp" in key)  # stages are whole layers
        for facts in (rank[key] for rank in found):
            assert facts["read"] <= room and facts["model"] <= room and facts["optimizer"] <= 2 * room, (key, facts)
        assert sum(rank[key]["read"] for rank in found) <= 1.05 * whole, key


def test_no_rank_reads_holds_or_sends_more_than_its_share(paths) -> None:
    """Sends are exact: bytes that two ranks put into an update's collectives, in micro-batches of 60 tokens."""
    found = run_ranks(2, all_counted, paths, LAYOUTS, 60, per_machine=1, timeout=200)
    assert_shares(found, paths, 2)
    whole, _ = stored_bytes(paths["llama"])
    (both_experts, experts), size = stored_bytes(paths["qwen3_moe"]), 2
    row = FLOAT * HIDDEN
    for rank in found:
        alone, tp, cp, pp, ep = rank.values()
        assert min(facts["count"] for facts in rank.values()) > 1
        for facts, dense in ((alone, whole), (cp, whole), (ep, both_experts - experts)):
            # FSDP: this rank's share of the weights once an update, gradients of all once a micro-batch
            assert facts["sent"]["allgather_base"] <= 1.01 * dense / size
            assert facts["sent"]["reduce_scatter_base"] == facts["count"] * dense
        # heads for tokens, there and back: queries and what is attended to, keys and values; the same for gradients
        heads = FLOAT * 2 * (HEADS + KV_HEADS) * HEAD_DIM
        assert cp["sent"]["alltoall_base"] == 2 * LAYERS * cp["tokens"] * heads
        assert cp["calls"]["alltoall_base"] == 2 * LAYERS * 4 * cp["count"]
        # a stage: one message a micro-batch and direction, and not a byte of weights or gradients of weights
        assert pp["sent"]["send"] == pp["sent"]["recv"] == pp["tokens"] * row
        assert pp["calls"]["send"] == pp["calls"]["recv"] == pp["count"]
        assert pp["calls"].keys() == {"send", "recv", "allgather"} and pp["sent"]["allgather"] < pp["sent"]["send"]
        # into each block of layers and out of it, of embedding and head; a rank has its part of a row's tokens
        assert tp["sent"]["allgather_base"] == 2 * (2 * LAYERS + 1) * tp["tokens"] * row
        assert tp["sent"]["reduce_scatter_base"] == size * tp["sent"]["allgather_base"]
    experts_of = [rank["qwen3_moe {'ep': 2}"] for rank in found]
    # each token to each of its experts and back, the same for gradients; and how many there are for each expert
    tokens, counts = sum(facts["tokens"] for facts in experts_of), 8 * 4 * LAYERS * experts_of[0]["count"] * size
    assert sum(facts["sent"]["alltoall_base"] for facts in experts_of) == 4 * LAYERS * tokens * TOP_K * row + counts


@pytest.mark.slow
def test_the_same_of_two_axes(paths) -> None:
    found = run_ranks(4, all_counted, paths, LARGE, 60, per_machine=1, timeout=250)
    assert_shares(found, paths, 4)
    for rank in found:
        for key, facts in rank.items():
            if "pp" in key:
                assert facts["sent"]["send"] == facts["sent"]["recv"] == facts["tokens"] * FLOAT * HIDDEN, key
