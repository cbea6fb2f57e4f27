"""Reward feedback on 1, 2 and 4 ranks: the same updates; Flow-GRPO's against plain torch as the paper has it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl.data import Prompts
from spmd_rl.data.seeds import counter_seed
from spmd_rl.model.diffusion.tiny import TinyTransformer, build_tiny, word_ids
from tests.dist.harness import run_ranks
from tests.pictures import LOSSES, learner, settings

STEPS, LEVELS = 2, [1, 0.75, 0.5, 0.25, 0]
KEYS = ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "actor/ratio", "actor/kl", "feedback/reward")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny(folder, updates=2)
    return folder


def train_here(world, model: str, more: list[str], wanted: str) -> list:
    """The metrics of each step, and how far weights are from those of `wanted`, which the first run writes."""
    rollouts, feedback = learner(settings(model, *more), world)
    found = []
    for step in range(1, STEPS + 1):
        gallery = rollouts.collect(step)
        metrics = gallery.metrics() | feedback.update(feedback.prepare(gallery))
        found.append({key: metrics[key] for key in KEYS if key in metrics})
    weights = {name: tensor.clone() for name, tensor in rollouts.policy.weights()}
    if not Path(wanted).exists():
        save_file(weights, wanted)
    saved = load_file(wanted)
    return [found, max(float((weights[name] - saved[name]).abs().max()) for name in saved)]


@pytest.mark.parametrize("loss", LOSSES)
def test_updates_are_equal_on_1_2_and_4_ranks(loss: str, model: Path, tmp_path: Path) -> None:
    args = (str(model), list(LOSSES[loss]), str(tmp_path / "wanted.safetensors"))
    runs = {size: run_ranks(size, train_here, *args) for size in (1, 2, 4)}
    (wanted, _), *_ = runs[1]
    for step in wanted:
        assert step["actor/grad_norm"] > 1e-4 and step.get("actor/ratio", 1) == pytest.approx(1, abs=0.2)
    for size, ranks in runs.items():
        for metrics, drift in ranks:
            for ours, first in zip(metrics, wanted, strict=True):
                assert ours == pytest.approx(first, rel=1e-5, abs=1e-7), size
            assert drift < 2e-5, size
    first = wanted[0].get("actor/ratio", 1.0)
    assert loss == "grpo" or first == 1.0, "the first update's ratio is exactly 1"


def plain_update(model: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Norm of the gradient and weights after one update of Flow-GRPO, written as the paper has it, in one batch."""
    cfg = settings(model)
    prompts = [Prompts.load(cfg.data).ticket(ticket, 0)[1] for ticket in range(3) for _ in range(4)]
    keys = [(ticket, number) for ticket in range(3) for number in range(4)]
    net, colours = TinyTransformer(), ["red", "green", "blue"]
    weights = load_file(model / "model.safetensors")
    net.load_state_dict({name.removeprefix("transformer."): tensor for name, tensor in weights.items()})
    ids = word_ids([prompt.messages[0].text for prompt in prompts])

    def noise(purpose: str) -> torch.Tensor:
        seeds = [counter_seed(0, purpose, 1, *key) >> 1 for key in keys]
        return torch.stack([torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in seeds])

    def step(x: torch.Tensor, i: int) -> tuple[torch.Tensor, float]:
        s, dt = LEVELS[i], LEVELS[i + 1] - LEVELS[i]
        v, inside = net(x, torch.full((12,), float(s)), ids), min(s, LEVELS[1])
        std = 0.7 * (inside / (1 - inside)) ** 0.5
        return x + (v + std**2 / (2 * s) * (x + (1 - s) * v)) * dt, std * (-dt) ** 0.5

    with torch.no_grad():
        path = [noise("picture")]
        for i in range(3):
            mean, sd = step(path[-1], i)
            path.append(mean + sd * noise(f"step {i}"))
        last = path[-1] + net(path[-1], torch.full((12,), 0.25), ids) * -0.25
        light = ((last + 1) / 2).clamp(0, 1).mean((2, 3))
        own = [colours.index(prompt.ground_truth.split()[1]) for prompt in prompts]
        reward = (light[range(12), own] / (light.sum(1) + 0.02)).view(3, 4).double()
        advantage = (reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-6)
    for i in range(3):
        mean, sd = step(path[i], i)
        logprob = -((path[i + 1] - mean) ** 2 / (2 * sd**2)).flatten(1).mean(1)
        ratio = (logprob - logprob.detach()).exp()
        (-(ratio * advantage.flatten().float()).mean() / 3).backward()
    norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    torch.optim.AdamW(net.parameters(), 1e-2, betas=cfg.policy.betas, eps=1e-3, weight_decay=0).step()
    return float(norm), {f"transformer.{name}": p.detach() for name, p in net.named_parameters()}


def update_once(world, model: str, path: str) -> list[float]:
    rollouts, feedback = learner(settings(model, "feedback=flow_grpo"), world)
    norm = feedback.update(feedback.prepare(rollouts.collect(1)))["actor/grad_norm"]
    wanted = load_file(path)
    return [norm, max(float((tensor - wanted[name]).abs().max()) for name, tensor in rollouts.policy.weights())]


def test_an_update_of_flow_grpo_is_that_of_plain_torch(model: Path, tmp_path: Path) -> None:
    norm, weights = plain_update(model)
    save_file(weights, tmp_path / "plain.safetensors")
    ((found, drift),) = run_ranks(1, update_once, str(model), str(tmp_path / "plain.safetensors"))
    assert found == pytest.approx(norm, rel=1e-4)
    assert drift < 1e-4


def descend(world, model: str, loss: str) -> list[float]:
    """The squared norm of the gradient, and the slope of the loss in its direction by a finite difference."""
    eta, eps = 0.3, 1e4
    # With a huge epsilon the first step of AdamW is one of plain descent: -lr g / eps.
    more = [*LOSSES[loss], f"policy.lr={eta * eps}", f"policy.eps={eps}"]
    rollouts, feedback = learner(settings(model, *more), world)
    items = feedback.prepare(rollouts.collect(1))
    first, second = feedback.update(items), feedback.update(items)
    return [first["actor/grad_norm"] ** 2, (first["actor/pg_loss"] - second["actor/pg_loss"]) / eta]


@pytest.mark.parametrize("loss", ["refl", "draft"])
def test_the_gradient_through_the_reward_is_that_of_finite_differences(loss: str, model: Path) -> None:
    ((square, slope),) = run_ranks(1, descend, str(model), loss)
    assert square > 1e-5 and slope == pytest.approx(square, rel=0.05)


def spoil(world, model: str) -> list:
    """A latent that is not a number on one of the ranks: what the update says, and whether weights moved."""
    rollouts, feedback = learner(settings(model, "feedback=draft"), world)
    before = [tensor.clone() for _, tensor in rollouts.policy.weights()]
    gallery = rollouts.collect(1)
    if world.rank == 1:
        gallery.drawn[0].latents[:] = float("nan")
    skipped = feedback.update(feedback.prepare(gallery))["actor/skipped"]
    after = [tensor.clone() for _, tensor in rollouts.policy.weights()]
    return [skipped, all(torch.equal(one, other) for one, other in zip(before, after, strict=True))]


def test_a_latent_that_is_not_a_number_skips_the_update_on_all_ranks(model: Path) -> None:
    assert run_ranks(2, spoil, str(model)) == [[1.0, True]] * 2
