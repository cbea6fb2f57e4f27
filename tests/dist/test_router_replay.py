"""Router replay: the experts that a batch names are used, with weights and gradients of the trainer's own router."""

from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from bench.router_noise import add_noise
from spmd_rl.base.errors import UserError
from spmd_rl.batch import Batch, Ragged, bounds_of, pack
from spmd_rl.distributed import World
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import build_model
from spmd_rl.model.moe import router_class
from spmd_rl.types import Request, Sample, Turn, Verdict
from tests.dist.harness import run_ranks
from tests.dist.test_train_parity import AS_GRADIENT, HUGE, as_stored, exported
from tests.models import EXPERTS, tiny
from tests.training import TEMPERATURE, backend, global_batch, loss, plain_backward, plain_forward, relative, share_of

TOP_K = 2


def forced_choices(batch: Batch, num_layers: int, num_experts: int) -> torch.Tensor:
    """Random experts for each sampled token that is followed by another one, -1 elsewhere: int64 [T, layers, k]."""
    generator = torch.Generator().manual_seed(5)
    shape = (batch.num_tokens, num_layers, num_experts)
    chosen = torch.rand(shape, generator=generator).argsort(-1)[..., :TOP_K]
    followed = torch.zeros_like(batch.loss_mask)
    followed[:-1] = batch.loss_mask[:-1] & batch.loss_mask[1:]
    followed[batch.starts[1:] - 1] = False
    return chosen.masked_fill(~followed[:, None, None], -1)


def own_choices(model, batch: Batch) -> torch.Tensor:
    """Those that the model makes by itself, for the same tokens."""
    seen = with_routers(model, lambda place, logits, chosen: None)
    bounds, found = batch.starts.tolist(), []
    for begin, end in pairwise(bounds):
        model(input_ids=batch.token_ids[None, begin:end])
        found.append(torch.stack([seen[place] for place in sorted(seen)], 1))
    known = forced_choices(batch, found[0].shape[1], TOP_K)
    return torch.cat(found).masked_fill(known < 0, -1)


def with_routers(model, change) -> dict[int, torch.Tensor]:
    """Hooks on the routers, which `change` may give other experts; the choices that they have made last."""
    seen: dict[int, torch.Tensor] = {}

    def hook(router, args, output, place):
        logits, weights, own = output
        seen[place] = own
        chosen = change(place, logits, own)
        if chosen is None:
            return None
        shares = logits.sigmoid() if hasattr(router, "e_score_correction_bias") else torch.softmax(logits, -1)
        rows = []
        for i, experts in enumerate(chosen.tolist()):
            mine = torch.stack([shares[i, expert] for expert in experts])
            rows.append(mine / mine.sum() if model.config.norm_topk_prob else mine)
        return logits, torch.stack(rows) * getattr(router, "routed_scaling_factor", 1.0), chosen

    routers = [module for module in model.modules() if isinstance(module, router_class(model))]
    for place, router in enumerate(routers):
        router.register_forward_hook(lambda m, a, out, place=place: hook(m, a, out, place))
    return seen


def with_experts(batch: Batch, chosen: torch.Tensor) -> Batch:
    lengths = batch.loss_mask * chosen[0].numel()
    values = chosen[batch.loss_mask].flatten().to(torch.int16)
    return replace(batch, experts=Ragged(values, bounds_of(lengths)))


def padded(batch: Batch, chosen: torch.Tensor) -> torch.Tensor:
    """As plain transformers sees the batch: [rows * longest, layers, k], -1 in the padding."""
    rows = [chosen[begin:end] for begin, end in pairwise(batch.starts.tolist())]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).flatten(0, 1)


def replayed(world: World, path: str, axes: dict[str, int], which: str, made=backend) -> dict[str, float]:
    """Errors of logprobs, loss and gradients against plain transformers with the same experts."""
    batch = global_batch()
    model = build_model(path, torch.float32, "cpu", attention="sdpa")
    if which == "own":
        chosen = own_choices(build_model(path, torch.float32, "cpu", attention="sdpa"), batch)
    else:
        chosen = forced_choices(batch, sum(isinstance(m, router_class(model)) for m in model.modules()), 4)
        forced = padded(batch, chosen)

        def change(place, logits, own):
            return torch.where(forced[:, place, :1] >= 0, forced[:, place], own)

        with_routers(model, change)
    mine = made(world, path, budget=60, axes=axes, router_replay=True, lr=100 * HUGE, **AS_GRADIENT)
    share = share_of(mine, "dealt", with_experts(batch, chosen))
    with torch.no_grad():
        wanted, _ = plain_forward(model, batch)
    wanted = share_of(mine, "dealt", replace(batch, old_logprobs=wanted * batch.loss_mask)).old_logprobs
    errors = {"logprobs": float((mine.logprobs(share, TEMPERATURE)[0] - wanted).abs().max())}
    before = exported(mine)
    metrics = mine.update(share, loss, TEMPERATURE)
    after = exported(mine)
    total, _ = plain_backward(model, batch)
    shares = {"own": lambda share: share == 0.0, "forced": lambda share: 0.2 < share < 0.8}
    assert shares[which](metrics["moe/replay_changed"]) and 0.2 < metrics["moe/replayed"] < 0.8, metrics
    errors["loss"] = abs(metrics["loss"] / total - 1)
    grads = as_stored(model, {name: p.grad for name, p in model.named_parameters()})
    return errors | {name: relative((before[name] - after[name]) / 100, grad) for name, grad in grads.items()}


LAYOUTS = [(1, {}), (2, {"ep": 2}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"cp": 2})]


@pytest.mark.parametrize(("size", "axes"), LAYOUTS, ids=str)
def test_the_named_experts_are_used_with_the_routers_own_weights(size: int, axes: dict[str, int], tmp_path) -> None:
    path = str(tiny("qwen3_moe", tmp_path, **EXPERTS["qwen3_moe"], norm_topk_prob=size == 2))
    for errors in run_ranks(size, replayed, path, axes, "forced"):
        assert max(errors.values()) < 1e-4 and len(errors) > 20, errors


def test_a_models_own_choices_change_nothing(tmp_path) -> None:
    path = str(tiny("mixtral", tmp_path, **EXPERTS["mixtral"]))
    for errors in run_ranks(1, replayed, path, {}, "own"):
        assert max(errors.values()) < 1e-4, errors


def refusals(world: World, dense: str) -> str:
    try:
        backend(world, dense, router_replay=True)
    except UserError as error:
        return str(error)
    return ""


def test_a_model_without_experts_is_refused(tmp_path) -> None:
    assert run_ranks(1, refusals, str(tiny("llama", tmp_path)))[0].startswith("policy.router_replay: ")


@pytest.mark.parametrize("kind", sorted(EXPERTS))
def test_every_known_family_weighs_as_its_router_does(kind: str, tmp_path) -> None:
    path = str(tiny(kind, tmp_path, **EXPERTS[kind]))
    assert run_ranks(1, refusals, path) == [""]


def under_noise(world: World, path: str, noise: str, in_prompts: bool) -> list[float]:
    """Mean |difference| of logprobs between an engine with noisy routers and a trainer, without replay and with it."""
    torch.manual_seed(0)
    module = empty_module(path, torch.float32)
    engine = NativeEngine(module, max_running=32, kv_tokens=4096, records_experts=True)
    mine = backend(world, path, router_replay=True)
    engine.load(mine.weights(), 1)
    if in_prompts:
        add_noise(module, noise)
    prompts = {f"{n}": array("i", [(n * i * i + 3) % 250 for i in range(3 + n)]) for n in range(16)}
    for id, prompt in prompts.items():
        engine.add(Request(id, prompt, 24, TEMPERATURE, int(id)))
    found = {completion.id: completion for completion in engine.step()}  # all prompts
    if not in_prompts:
        add_noise(module, noise)
    while engine.num_unfinished:
        found |= {completion.id: completion for completion in engine.step()}
    samples = []
    for id, c in found.items():
        turn = Turn(prompts[id], c.token_ids, c.logprobs, c.versions, c.finish_reason, experts=c.experts)
        samples.append(Sample(int(id), 0, (turn,), Verdict("ok")))
    batches = (pack(samples), pack(samples, replayed=True))
    return [float((mine.logprobs(b, TEMPERATURE)[0] - b.rollout_logprobs)[b.loss_mask].abs().mean()) for b in batches]


@pytest.mark.parametrize(("noise", "in_prompts"), [("bf16", False), ("bf16", True), ("0.1", False), ("0.1", True)])
def test_what_noise_on_the_engines_routers_does(noise: str, in_prompts: bool, tmp_path) -> None:
    """In bfloat16, replay brings the logprobs to within 1e-3. Flips in prompts are not replayed, and stay."""
    sizes = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 4}
    path = str(tiny("qwen3_moe", tmp_path, **sizes, initializer_range=0.1, norm_topk_prob=True))
    without, replayed = run_ranks(1, under_noise, path, noise, in_prompts)[0]
    assert replayed < without / 2, (without, replayed)
    assert noise != "bf16" or without > 5e-3 and replayed < (5e-3 if in_prompts else 1e-3), (without, replayed)
