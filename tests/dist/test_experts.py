"""Experts shared out over ranks: dispatch against a plain loop, routing's loss and numbers, bytes, checkpoints."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import PolicyConfig, RlvrConfig, TrainConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model
from spmd_rl.model.moe import router_class, spread
from spmd_rl.train import build_role
from spmd_rl.train.fsdp2 import gather
from tests.dist.harness import run_ranks
from tests.dist.test_train_state import digest, save
from tests.models import EXPERTS, tiny
from tests.training import TEMPERATURE, backend, global_batch, loss, plain_backward, relative, share_of

EP2 = {"ep": 2}
NUM_EXPERTS, TOP_K, WIDTH = 8, 3, 16
ROUTINGS = {
    "any": lambda rank, n: torch.rand(n, NUM_EXPERTS).argsort(1)[:, :TOP_K],
    "first rank's experts alone": lambda rank, n: torch.rand(n, TOP_K).argsort(1),
    "one expert of all": lambda rank, n: torch.full((n, 1), 5),
    "a rank without tokens": lambda rank, n: torch.rand(0 if rank == 1 else n, NUM_EXPERTS).argsort(1)[:, :TOP_K],
    "nothing": lambda rank, n: torch.zeros(0, TOP_K, dtype=torch.int64),
}


def plain_experts(module: nn.Module, hidden, chosen, weights) -> torch.Tensor:
    """One token, one choice after the other."""
    rows = []
    for x, experts, shares in zip(hidden, chosen.tolist(), weights, strict=True):
        total = torch.zeros_like(x)
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (module.gate_up_proj[expert] @ x).chunk(2)
            total = total + share * (module.down_proj[expert] @ (nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows) if rows else hidden


def dispatched(world: World, routing: str) -> dict[str, float]:
    """Relative errors of the outputs and of all gradients, in float64."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=12, num_experts=NUM_EXPERTS)
    whole = Qwen3MoeExperts(config).double()
    for p in whole.parameters():
        nn.init.normal_(p)
    mine = Qwen3MoeExperts(config).double()
    size, here = (
        NUM_EXPERTS // world.size,
        slice(*(NUM_EXPERTS // world.size * i for i in (world.rank, world.rank + 1))),
    )
    for key, p in whole.named_parameters():
        setattr(mine, key, nn.Parameter(p.detach()[here].clone()))
    layout = Layout(world, ep=world.size)
    layout.share_experts()
    spread(mine, layout.group("ep"))
    inputs = []
    for rank in range(world.size):
        chosen = ROUTINGS[routing](rank, 5 + 2 * rank)
        hidden, weights = torch.randn(len(chosen), WIDTH).double(), torch.rand(chosen.shape).double()
        inputs.append((hidden.requires_grad_(), chosen, weights.requires_grad_()))
    expected = [plain_experts(whole, *one) for one in inputs]
    sum(out.square().sum() for out in expected).backward()
    wanted = [inputs[world.rank][i].grad.clone() for i in (0, 2)] if len(expected[world.rank]) else []
    hidden, chosen, weights = (t.detach() for t in inputs[world.rank])
    hidden, weights = hidden.requires_grad_(), weights.requires_grad_()
    out = mine(hidden, chosen, weights)
    out.square().sum().backward()
    pairs = {"out": (out, expected[world.rank])}
    if wanted:
        pairs |= {"hidden": (hidden.grad, wanted[0]), "weights": (weights.grad, wanted[1])}
    for key, p in whole.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        pairs[key] = getattr(mine, key).grad, grad[here]
    assert len(mine.gate_up_proj.grad) == size
    assert all(a.shape == b.shape for a, b in pairs.values())
    return {key: float((a - b).norm()) / max(1.0, float(b.norm())) for key, (a, b) in pairs.items()}


def all_dispatched(world: World) -> dict[str, dict[str, float]]:
    return {routing: dispatched(world, routing) for routing in ROUTINGS}


@pytest.mark.parametrize("size", [2, 4])
def test_every_token_meets_its_experts_wherever_they_are(size: int) -> None:
    for found in run_ranks(size, all_dispatched):
        for routing, errors in found.items():
            assert max(errors.values()) < 1e-13, (routing, errors)


def plain_auxiliary(model: nn.Module, batch) -> tuple[torch.Tensor, dict[str, float]]:
    """The auxiliary loss of a whole batch, right-padded, with its graph; what the metrics should be."""
    seen = []
    for module in model.modules():
        if isinstance(module, router_class(model)):
            module.register_forward_hook(lambda m, _, out: seen.append((out[0], out[2])))
    bounds = batch.starts.tolist()
    rows = [batch.token_ids[begin:end] for begin, end in pairwise(bounds)]
    ids, real = (pad_sequence(x, batch_first=True) for x in (rows, [torch.ones_like(row) for row in rows]))
    model(input_ids=ids, attention_mask=real)
    total, facts = 0.0, Counter()
    for logits, chosen in seen:
        shares = torch.softmax(logits, -1)[real.flatten() > 0]
        load = torch.bincount(chosen[real.flatten() > 0].flatten(), minlength=logits.shape[1]).float()
        total = total + logits.shape[1] * (load / load.sum() * shares.mean(0)).sum()
        facts["moe/load_max_mean"] += float(load.max() / load.mean()) / len(seen)
        facts["moe/entropy"] += float(-(shares * shares.log()).sum(1).mean()) / len(seen)
    return total, facts | {"moe/aux_loss": float(total) / len(seen)}


def with_auxiliary(world: World, path: str, axes: dict[str, int], checkpointing: str, made=backend) -> dict:
    """Gradients with an auxiliary loss, where all ranks compute one micro-batch each, against those of plain torch."""
    coef, scale, huge = 0.3, 100.0, 1e12
    batch = global_batch()
    settings = {"max_grad_norm": huge, "eps": huge, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0}
    settings |= {"lr": scale * huge, "router_aux_coef": coef}
    mine = made(world, path, axes=axes, checkpointing=checkpointing, **settings)
    before = {name: tensor.clone() for name, tensor in mine.weights()}
    metrics = mine.update(share_of(mine, "dealt", batch), loss, TEMPERATURE)
    after = {name: tensor.clone() for name, tensor in mine.weights()}
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    plain_backward(model, batch)
    without = {name: p.grad.clone() for name, p in model.named_parameters()}
    total, means = plain_auxiliary(model, batch)
    (coef * total).backward()
    gates = [name for name in before if ".gate.weight" in name]
    wanted = {name: p.grad for name, p in model.named_parameters()}
    return {
        "gates": [relative((before[name] - after[name]) / scale, wanted[name]) for name in gates],
        "matters": [relative(without[name], wanted[name]) for name in gates],
        "others": [
            relative((before[n] - after[n]) / scale, wanted[n]) for n in wanted if "layers.0" in n and n in before
        ],
        "metrics": [abs(metrics[name] / mean - 1) for name, mean in means.items()],
        "microbatches": metrics["num_microbatches"],
        "dropped": metrics["moe/dropped"],
    }


@pytest.mark.parametrize(
    ("size", "axes", "checkpointing"),
    [
        (1, {}, "none"),
        (2, EP2, "full"),
        (2, EP2, "selective"),
        (4, EP2 | {"cp": 2}, "none"),
        (4, {"ep": 4, "tp": 2}, "full"),
    ],
)
def test_the_auxiliary_loss_is_that_of_one_rank_with_all_tokens(size, axes, checkpointing, tmp_path) -> None:
    path = tiny("qwen3_moe", tmp_path, **EXPERTS["qwen3_moe"])
    for seen in run_ranks(size, with_auxiliary, str(path), axes, checkpointing, timeout=200):
        assert seen["microbatches"] == 1 and seen["dropped"] == 0
        assert len(seen["gates"]) == 2 and min(seen["matters"]) > 0.1
        assert max(seen["gates"] + seen["others"] + seen["metrics"]) < 1e-4, seen


def recomputed(world: World, path: str) -> list[str]:
    found = []
    for checkpointing in ("none", "selective", "full"):
        mine = backend(world, path, axes=EP2, checkpointing=checkpointing)
        mine.update(share_of(mine, "dealt", global_batch()), loss, TEMPERATURE)
        found.append(digest(mine))
    return found


def test_experts_between_others_are_recomputed_to_the_bit(tmp_path) -> None:
    """DeepSeek-V3's shared experts come after the experts, whose hooks run in the second pass."""
    for found in run_ranks(2, recomputed, str(tiny("deepseek_v3", tmp_path, **EXPERTS["deepseek_v3"])), timeout=200):
        assert len(set(found)) == 1


def trained(world: World, path: str, folder: str, axes: dict[str, int]) -> str:
    mine = backend(world, path, axes=axes)
    for seed in range(2):
        mine.update(share_of(mine, "dealt", global_batch(seed)), loss, TEMPERATURE)
    save(world, mine, folder)
    return digest(mine)


def loaded(world: World, other: str, folder: str, axes: dict[str, int]) -> list[str]:
    mine = backend(world, other, axes=axes)
    before = digest(mine)
    mine.load(Path(folder))
    return [digest(mine), before]


def with_biases(world: World, path: str, folder: str, axes: dict[str, int], made=backend) -> dict[str, list]:
    """Biases of the experts after each of three updates that change nothing else, and what they should be."""
    speed, batch = 0.05, global_batch()
    mine = made(world, path, axes=axes, lr=0.0, weight_decay=0.0, router_bias_update_speed=speed, budget=60)
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    routers = [module for module in model.modules() if isinstance(module, router_class(model))]
    seen: dict[int, torch.Tensor] = {}
    for i, router in enumerate(routers):
        router.register_forward_hook(lambda m, _, out, i=i: seen.update({i: out[2]}))
    bounds = batch.starts.tolist()
    rows = [batch.token_ids[begin:end] for begin, end in pairwise(bounds)]
    ids, real = (pad_sequence(x, batch_first=True) for x in (rows, [torch.ones_like(row) for row in rows]))
    found, wanted = [], []
    for _ in range(3):
        mine.update(share_of(mine, "dealt", batch), loss, TEMPERATURE)
        model(input_ids=ids, attention_mask=real)
        for i, router in enumerate(routers):
            load = torch.bincount(seen[i][real.flatten() > 0].flatten(), minlength=router.num_experts).float()
            router.e_score_correction_bias += speed * torch.sign(load.mean() - load)
        found.append([t.tolist() for name, t in mine.weights() if "correction_bias" in name])
        wanted.append([router.e_score_correction_bias.tolist() for router in routers])
    save(world, mine, folder)
    fresh = made(world, path, axes=axes, router_bias_update_speed=speed)
    fresh.load(Path(folder))
    again = [t.tolist() for name, t in fresh.weights() if "correction_bias" in name]
    return {"found": found, "wanted": wanted, "loaded": again}


def assert_biases_move(seen: dict[str, list]) -> None:
    assert torch.allclose(torch.tensor(seen["found"]), torch.tensor(seen["wanted"]), atol=1e-6, rtol=0), seen
    assert seen["loaded"] == seen["found"][-1] and len(seen["loaded"]) == 2
    assert seen["found"][0] != seen["found"][1]


@pytest.mark.parametrize(("size", "axes"), [(1, {}), (2, EP2)], ids=str)
def test_biases_move_by_the_sign_of_what_their_experts_lack(size: int, axes: dict[str, int], tmp_path) -> None:
    path = tiny("deepseek_v3", tmp_path / "m", **EXPERTS["deepseek_v3"] | {"num_hidden_layers": 3})
    for seen in run_ranks(size, with_biases, str(path), str(tmp_path / "policy"), axes):
        assert_biases_move(seen)


BOTH = EP2 | {"tp": 2}
PAIRS = [((2, EP2), (1, {})), ((2, {}), (2, EP2)), ((1, {}), (4, BOTH))]
PAIRS += [pytest.param(*pair, marks=pytest.mark.slow) for pair in (((4, EP2), (2, EP2)), ((4, BOTH), (2, EP2)))]


@pytest.mark.parametrize(("saver", "loader"), PAIRS, ids=str)
def test_a_checkpoint_loads_with_other_shares_of_experts_to_the_bit(saver, loader, tmp_path) -> None:
    sizes = EXPERTS["qwen3_moe"] | {"num_experts": 6, "num_hidden_layers": 1}
    path = tiny("qwen3_moe", tmp_path / "a", **sizes)
    other = tiny("qwen3_moe", tmp_path / "b", seed=1, **sizes)
    (size, axes), (later, later_axes) = saver, loader
    wanted = run_ranks(size, trained, str(path), str(tmp_path / "policy"), axes, timeout=150)
    assert len(set(wanted)) == 1
    for found, before in run_ranks(later, loaded, str(other), str(tmp_path / "policy"), later_axes, timeout=150):
        assert found == wanted[0] != before


def started(world: World, path: str, axes: dict[str, int]) -> dict[str, float]:
    """Bytes read at start and held, of a role filled from files; whether it exports what is stored, bit for bit,
    whole or in slices."""
    cfg = RlvrConfig(policy=PolicyConfig(model=path, dtype="float32", dither=False), train=TrainConfig(**axes))
    policy = build_role(cfg.role("policy"), world)
    lines = [json.loads(line) for line in world.journal.path.read_text().splitlines()]
    held = sum(t.to_local().nbytes for t in policy.model.state_dict()["model"].values())
    stored = build_role(RlvrConfig(policy=cfg.policy).role("policy"), world)
    pairs = zip(policy.weights(), stored.weights(), strict=True)
    equal = all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    read = next(line["bytes"] for line in lines if line["event"] == "loaded")
    whole = {name: tensor.clone() for name, tensor in stored.weights()}
    gather.BUCKET_BYTES = 64  # less than one expert
    sliced = build_role(cfg.role("policy"), world).weights()
    equal = equal and all(torch.equal(tensor, whole.pop(name)) for name, tensor in sliced) and not whole
    return {"read": read, "held": held, "equal": equal}


@pytest.mark.parametrize(("size", "axes"), [(2, EP2), (4, EP2), (4, BOTH)], ids=str)
def test_each_rank_reads_and_holds_its_share(size: int, axes: dict[str, int], tmp_path) -> None:
    path = tiny("qwen3_moe", tmp_path, **EXPERTS["qwen3_moe"] | {"num_experts": 6, "moe_intermediate_size": 128})
    stored = (path / "model.safetensors").stat().st_size
    for seen in run_ranks(size, started, str(path), axes, timeout=200):
        assert seen["read"] <= 1.1 * stored / size and seen["held"] <= 1.1 * stored / size
        assert seen["equal"]


def refusals(world: World, dense: str, odd: str) -> list[str]:
    told = []
    for path, axes, settings in (
        (dense, EP2, {}), (odd, EP2, {}), (dense, {}, {"router_aux_coef": 0.1}),
        (odd, {}, {"router_bias_update_speed": 0.1}),
    ):  # fmt: skip
        try:
            backend(world, path, axes=axes, **settings)
        except UserError as error:
            told.append(str(error))
    return told


def test_what_cannot_be_shared_out_is_the_users_mistake(tmp_path) -> None:
    odd = tiny("qwen3_moe", tmp_path / "odd", **EXPERTS["qwen3_moe"] | {"num_experts": 3})
    for told in run_ranks(2, refusals, str(tiny("llama", tmp_path / "dense")), str(odd)):
        assert len(told) == 4, told
        assert told[0].startswith("train.ep: ") and "has no experts" in told[0] and told[0].endswith("must be 1")
        assert told[1].startswith("train.ep: 2 ranks cannot share the 3 experts of") and told[1].endswith("fit: 1, 3")
        assert told[2].startswith("policy.router_aux_coef: ")
        assert told[3].startswith("policy.router_bias_update_speed: ") and "e_score_correction_bias" in told[3]
