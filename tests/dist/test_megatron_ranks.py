"""Megatron beside FSDP2: each goes on from what the other has saved; skipped updates, bfloat16, wrong mappings.

Two of three ranks do all of it in one go; they never meet the first one.
"""

import math
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from spmd_rl import weights
from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.config.schema import CriticConfig, TrainConfig
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import build_model
from spmd_rl.train import build_role
from spmd_rl.train.state import SavedState
from tests.dist.test_experts import assert_biases_move, with_auxiliary, with_biases
from tests.dist.test_router_replay import replayed
from tests.dist.test_train_parity import AS_GRADIENT, HUGE, as_stored, critic_errors, plain_values, with_random_head
from tests.dist.test_train_state import save
from tests.models import EXPERTS, tiny
from tests.plain_engine.engine import PlainEngine
from tests.training import TEMPERATURE, built, fsdp2_critic, global_batch, loss, plain_backward, relative, share_of

ARCHITECTURES = "spmd_rl.train.megatron.architectures"
EPS = 1e-3
"""It hides gradients that are rounding alone, of which AdamW would make whole steps."""
MODELS = {
    "llama": ("llama", {"tie": True, "vocab_size": 263}),
    "qwen3_moe": ("qwen3_moe", {"vocab_size": 263, **EXPERTS["qwen3_moe"]}),
    "plain": ("llama", {"num_key_value_heads": 4}),
    "deepseek_v3": ("deepseek_v3", {"vocab_size": 263, "num_hidden_layers": 3, **EXPERTS["deepseek_v3"]}),
}
PAIRS = {
    "tp2 to data shards": ("llama", ("megatron", {"tp": 2}), ("fsdp2", {})),
    "data shards to pp2": ("llama", ("fsdp2", {}), ("megatron", {"pp": 2})),
    "distributed optimizer to tp2": ("llama", ("megatron", {}), ("megatron", {"tp": 2})),
    "experts shared out to pp2": ("qwen3_moe", ("megatron", {"ep": 2}), ("fsdp2", {"pp": 2})),
    "experts whole to shared out": ("qwen3_moe", ("fsdp2", {}), ("megatron", {"ep": 2})),
    "latents tp2 to data shards": ("deepseek_v3", ("megatron", {"tp": 2}), ("fsdp2", {})),
    "latents data shards to pp2": ("deepseek_v3", ("fsdp2", {}), ("megatron", {"pp": 2})),
}
BIASED = {"deepseek_v3": {"router_bias_update_speed": 0.01}}
"""By model: what else is trained there, and so saved"""


def step(role, seed: int) -> dict[str, float]:
    return role.update(share_of(role, "uneven", global_batch(seed)), loss, TEMPERATURE)


def whole(role) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in role.weights()}


def goes_on(world: World, paths, folder: str, case: str) -> dict[str, float]:
    """Two updates and a save by one; then both make one more, the other from what was saved."""
    model, (writes, layout), (reads, other_layout) = PAIRS[case]
    own = {"budget": 60, "eps": EPS, **BIASED.get(model, {})}
    writer = built(writes, world, paths[f"{model} 0"], axes=layout, **own)
    for seed in range(2):
        step(writer, seed)
    counters, exact = save(world, writer, f"{folder}/{case}"), whole(writer)
    reader = built(reads, world, paths[f"{model} 1"], axes=other_layout, **own)
    before = whole(reader)
    reader.load(Path(f"{folder}/{case}"))
    reader.load_counters(counters)
    read = whole(reader)
    straight, resumed = step(writer, 2), step(reader, 2)
    went, goes = whole(writer), whole(reader)
    return {
        "differs before": float(any(not torch.equal(before[key], exact[key]) for key in exact)),
        "read": float(all(torch.equal(read[key], exact[key]) for key in exact)),
        "norm": abs(resumed["grad_norm"] / straight["grad_norm"] - 1),
        "next update": max(relative(goes[key], went[key]) for key in went),
        "names": float(read.keys() == exact.keys()),
    }


def resumes(world: World, paths, folder: str, axes) -> bool:
    """The same layout goes on to the bit, and with an uninterrupted run."""
    straight = built("megatron", world, paths["llama 0"], axes=axes)
    step(straight, 0)
    counters = save(world, straight, folder)
    resumed = built("megatron", world, paths["llama 1"], axes=axes)
    resumed.load(Path(folder))
    resumed.load_counters(counters)
    both = [[step(role, seed) for seed in (1, 2)] for role in (straight, resumed)]
    went, goes = whole(straight), whole(resumed)
    return both[0] == both[1] and all(torch.equal(went[key], goes[key]) for key in went)


def skips(world: World, path: str, folder: str) -> list[bool]:
    """One rank's infinite weight skips the update on all, and changes neither weights nor moments."""
    mine = built("megatron", world, path, max_skipped_updates=2)
    step(mine, 0)
    save(world, mine, f"{folder}/before")
    bad = share_of(mine, "dealt", global_batch())
    if world.rank == world.size - 1:
        bad.weights[bad.loss_mask] = math.inf
    facts = [mine.update(bad, loss, TEMPERATURE)["skipped"] == 1.0]
    save(world, mine, f"{folder}/after")
    before, after = (SavedState.open(Path(folder) / name) for name in ("before", "after"))
    facts.append(all(torch.equal(before.read(name), after.read(name)) for name in before.tensors))
    facts.append(step(mine, 1)["skipped"] == 0.0)
    mine.update(bad, loss, TEMPERATURE)
    try:
        mine.update(bad, loss, TEMPERATURE)
    except RunFailed as error:
        facts.append("2 updates in a row" in str(error))
    return facts


def rounds(world: World, path: str, axes) -> dict[str, bool]:
    """Of a bfloat16 model: what is published, what it computes with, and updates too small for bfloat16."""
    mine = built("megatron", world, path, "bfloat16", axes=axes, lr=1e-4, warmup_steps=0)
    plain = build_model(path, torch.float32, "cpu", attention="eager")
    wanted = as_stored(plain, dict(plain.named_parameters()))
    first, metrics = whole(mine), [step(mine, seed) for seed in range(2)]
    return {
        "starts as the rounded weights": all(torch.equal(first[key], wanted[key].bfloat16()) for key in wanted),
        "biases stay float32": all(t.dtype == torch.float32 for name, t in first.items() if name not in wanted),
        "changes": any(not torch.equal(first[key], tensor) for key, tensor in mine.weights()),
        "is close to float32": metrics[0]["loss"] != 0 and all(math.isfinite(one["grad_norm"]) for one in metrics),
    }


def with_padding(world: World, path: str, axes) -> dict[str, float]:
    """Relative errors of gradients where samples contain the token that transformers takes for padding."""
    batch = global_batch()
    batch.token_ids[torch.arange(3, batch.num_tokens, 7)] = 256
    mine = built("megatron", world, path, axes=axes, lr=100 * HUGE, **AS_GRADIENT)
    before = whole(mine)
    mine.update(share_of(mine, "dealt", batch), loss, TEMPERATURE)
    plain, after = build_model(path, torch.float32, "cpu", attention="sdpa"), whole(mine)
    assert plain.get_input_embeddings().padding_idx == 256
    plain_backward(plain, batch)
    wanted = as_stored(plain, {name: p.grad for name, p in plain.named_parameters()})
    return {name: relative((before[name] - after[name]) / 100, grad) for name, grad in wanted.items()}


def values(world: World, path: str, folder: str, axes) -> list[float]:
    """Errors of a critic that goes on from what FSDP2 has saved, against plain torch; before, its values are 0."""
    own = CriticConfig(lr=1e-2, eps=1e-3)
    random = with_random_head(build_model(path, torch.float32, "cpu"))
    writer = fsdp2_critic(random, Layout(world), TrainConfig(), torch.float32, own, 5)
    counters, train = save(world, writer, folder), TrainConfig(name="megatron", tokens_per_microbatch=60, **axes)
    mine = build_role(RoleConfig("critic", own, path, "float32", False, train, 5), world)
    start = mine.values(share_of(mine, "uneven", global_batch()))
    mine.load(Path(folder))
    mine.load_counters(counters)
    summing = with_random_head(build_model(path, torch.float32, "cpu", attention="eager"))
    share = share_of(mine, "dealt", global_batch())
    with torch.no_grad():  # see `ForwardArgs.is_fingerprint`
        summing.get_output_embeddings().weight.fill_(mine.hidden_size**-0.5)
        summing.get_output_embeddings().bias.zero_()
        apart = (mine.packing_fingerprint(share) - plain_values(summing, share)).abs()
    return [float(start.abs().sum()), float(apart.amax()), *critic_errors(mine, path, own)]


def swapped_queries(rules) -> None:
    name = next(name for name in rules if "linear_qkv" in name)
    q, k, v = rules[name].names
    rules[name] = type(rules[name])(k, q, v)


def exchanged_halves(rules) -> None:
    """What latents become keys and what they become values, each head's."""
    name = next(name for name in rules if "linear_kv_up_proj" in name)

    class Exchanged(type(rules[name])):
        def pieces(self, shapes, share):
            (whole,) = super().pieces(shapes, share)
            (rows, columns), width = whole.region, EXPERTS["deepseek_v3"]["qk_nope_head_dim"]
            head = width + EXPERTS["deepseek_v3"]["v_head_dim"]
            for begin in range(0, rows.stop, head):
                for first, last, moved in ((0, width, head - width), (width, head, -width)):
                    stored = slice(*(whole.stored[0].start + begin + row for row in (first, last)))
                    own = slice(*(begin + row + moved for row in (first, last)))
                    yield whole._replace(stored=(stored, columns), region=(own, columns))

    rules[name] = Exchanged(*rules[name].names)


def joined_wrongly(rules) -> None:
    """Each rank gets the other one's part of the gate beside its own of what it gates."""
    name = next(name for name in rules if "linear_fc1" in name)

    class Turned(type(rules[name])):
        def pieces(self, shapes, share):
            other = share._replace(rank=share.size - 1 - share.rank)
            gate, _ = super().pieces(shapes, other)
            _, up = super().pieces(shapes, share)
            return [gate, up]

    rules[name] = Turned(*rules[name].names)


def loses_an_expert(rules) -> None:
    """The second expert is made of the first one's weights."""
    name = next(name for name in rules if ".local_experts." in name and "linear_fc2" in name)

    class Twice(type(rules[name])):
        def named(self, *numbers):
            return super().named(*(numbers if numbers[-1] != 1 else (numbers[0], 0)))

    rules[name] = Twice(*rules[name].names)


def published(world: World, path: str, architecture: str, spoil=None) -> str:
    """What a publish into native engines says; `spoil` changes the architecture's rules for it."""
    module = import_module(f"{ARCHITECTURES}.{architecture}")
    sound = dict(module.NAMES)
    try:
        if spoil is not None:
            spoil(module.NAMES)
        policy = built("megatron", world, path, axes={"tp": 2})
        is_latent = architecture == "deepseek_v3"
        engine = PlainEngine(path) if is_latent else NativeEngine(empty_module(path, torch.float32), 4, 256)
        publish = weights.build(policy, engine, world)
        metrics = publish(version=0)
        return "sound" if metrics["publish/probe_abs_diff"] < 1e-5 else "unsound"
    except (RunFailed, UserError) as error:
        return str(error)
    finally:
        module.NAMES.clear()
        module.NAMES.update(sound)


def everything(world: World, paths: dict[str, str], folder: str) -> dict:
    return {
        "goes on": {case: goes_on(world, paths, folder, case) for case in PAIRS},
        "resumes": [resumes(world, paths, f"{folder}/{axes}", axes) for axes in ({}, {"tp": 2}, {"pp": 2})],
        "skips": skips(world, paths["llama 0"], folder),
        "rounds": [rounds(world, paths["llama 0"], axes) for axes in ({}, {"tp": 2}, {"pp": 2})]
        + [rounds(world, paths["deepseek_v3 0"], {"tp": 2})],
        "sound": published(world, paths["plain 0"], "llama"),
        "swapped": published(world, paths["plain 0"], "llama", swapped_queries),
        "joined": published(world, paths["plain 0"], "llama", joined_wrongly),
        "replayed": [
            replayed(world, paths["qwen3_moe 0"], axes, "forced", partial(built, "megatron"))
            for axes in ({"ep": 2}, {"tp": 2}, {"pp": 2})
        ]
        + [replayed(world, paths["deepseek_v3 0"], {"pp": 2}, "forced", partial(built, "megatron"))],
        "biases": with_biases(world, paths["deepseek_v3 0"], f"{folder}/b", {"ep": 2}, partial(built, "megatron")),
        "balanced": [
            with_auxiliary(world, paths["qwen3_moe 0"], axes, checkpointing, partial(built, "megatron"))
            for axes, checkpointing in (({"ep": 2}, "full"), ({"tp": 2}, "none"), ({"pp": 2}, "none"))
        ],
        "padding": [with_padding(world, paths["llama 0"], axes) for axes in ({}, {"tp": 2}, {"pp": 2})],
        "values": [
            values(world, paths[f"{model} 0"], f"{folder}/values {model} {axes}", axes)
            for model, axes in (("llama", {}), ("llama", {"tp": 2}), ("qwen3_moe", {"pp": 2}), ("llama", {"cp": 2}))
        ],
        "lost": published(world, paths["qwen3_moe 0"], "qwen3_moe", loses_an_expert),
        "sound latents": published(world, paths["deepseek_v3 0"], "deepseek_v3"),
        "exchanged": published(world, paths["deepseek_v3 0"], "deepseek_v3", exchanged_halves),
        "latents lost": published(world, paths["deepseek_v3 0"], "deepseek_v3", loses_an_expert),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory, three) -> list[dict]:
    folder = tmp_path_factory.mktemp("megatron")
    paths = {
        f"{name} {seed}": str(tiny(kind, folder / f"{name} {seed}", seed=seed, **sizes))
        for name, (kind, sizes) in MODELS.items()
        for seed in (0, 1)
    }
    return three.run(everything, paths, str(folder), ranks=[1, 2], timeout=280)


@pytest.mark.parametrize("case", PAIRS)
def test_one_backend_goes_on_from_what_the_other_has_saved(case: str, found) -> None:
    for facts in (of_rank["goes on"][case] for of_rank in found):
        assert facts["differs before"] == facts["read"] == facts["names"] == 1.0, facts
        assert facts["norm"] < 1e-5 and facts["next update"] < 1e-5, facts


def test_a_resume_is_bitwise(found) -> None:
    assert [of_rank["resumes"] for of_rank in found] == [[True] * 3] * 2


def test_a_gradient_that_is_not_finite_changes_nothing(found) -> None:
    assert [of_rank["skips"] for of_rank in found] == [[True] * 4] * 2


def test_bfloat16_over_float32_masters(found) -> None:
    for facts in (facts for of_rank in found for facts in of_rank["rounds"]):
        assert all(facts.values()), facts


def test_a_wrong_mapping_ends_the_run_by_name(found) -> None:
    for of_rank in found:
        assert of_rank["sound"] == of_rank["sound latents"] == "sound"
        for wrong in ("swapped", "joined", "exchanged"):
            assert "the engine's logprobs are" in of_rank[wrong] and "from the trainer's" in of_rank[wrong], of_rank
        for lost in (of_rank["lost"], of_rank["latents lost"]):
            assert "mlp.experts.1.down_proj.weight, which Megatron's model lacks" in lost, lost


def test_the_experts_that_the_engine_chose_are_used(found) -> None:
    for errors in (errors for of_rank in found for errors in of_rank["replayed"]):
        assert max(errors.values()) < 1e-4 and len(errors) > 20, errors


def test_biases_move_by_the_sign_of_what_their_experts_lack(found) -> None:
    for of_rank in found:
        assert_biases_move(of_rank["biases"])


def test_the_auxiliary_loss_is_that_of_one_rank_with_all_tokens(found) -> None:
    for seen in (seen for of_rank in found for seen in of_rank["balanced"]):
        assert seen["microbatches"] == 1 and seen["dropped"] == 0
        assert len(seen["gates"]) == 2 and min(seen["matters"]) > 0.1
        assert max(seen["gates"] + seen["others"] + seen["metrics"]) < 1e-4, seen


def test_what_transformers_takes_for_padding_gets_no_gradient(found) -> None:
    for errors in (errors for of_rank in found for errors in of_rank["padding"]):
        assert max(errors.values()) < 1e-5 and len(errors) > 15, errors


def test_a_critic_follows_plain_torch(found) -> None:
    for errors in (errors for of_rank in found for errors in of_rank["values"]):
        assert len(errors) == 9 and max(errors) < 1e-4, errors
