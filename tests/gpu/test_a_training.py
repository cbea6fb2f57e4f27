"""Training: one step end to end, kernels against float32, speed and waits of an update, a publish, the demo."""

import json
import os
import signal
import subprocess
import sys
import time
from array import array
from itertools import accumulate

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl import weights
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.learn.losses import bind_loss
from spmd_rl.learn.utilization import forward_flops
from spmd_rl.model.attention import Packing
from spmd_rl.model.build import build_model, shape_on_meta, weights_of
from spmd_rl.model.fingerprint import fingerprint
from spmd_rl.model.hybrid import Segments
from spmd_rl.model.logprobs import token_logprobs
from spmd_rl.model.smollm2 import default_dir, is_complete
from spmd_rl.rollout.table import ANSWER
from spmd_rl.train.offload import Offload
from spmd_rl.types import Request
from tests.gpu.machine import (
    DEVICE,
    REHEARSED,
    ROOT,
    native,
    note,
    one_rank,
    peak_gb,
    pytestmark,  # noqa: F401
    samples,
    seconds,
    shape,
    synchronize,
    trainer,
    waits,
)
from tests.models import HYBRID, tiny
from tests.patience import patient
from tests.training import relative

DEMO = [sys.executable, "-m", "spmd_rl.rlvr", "+experiment=demo", "seed=0"]
has_smollm2 = pytest.mark.skipif(not is_complete(default_dir()), reason="python -m spmd_rl smollm2")


def demo(tmp_path, *args, **options):
    """Start the demo on this machine."""
    return subprocess.Popen([*DEMO, f"run.dir={tmp_path}/run", *args], cwd=ROOT, **options)


@pytest.mark.parametrize(
    "more", [(), ("train.offload=true", "train.activation_checkpointing=full")], ids=["", "offload"]
)
def test_1_two_steps_end_to_end(more, tmp_path):
    """A random model, whose answers are all wrong."""
    note("versions", torch=torch.__version__, device=DEVICE.type)
    model = f"policy.model={tiny('llama', tmp_path / 'model')}"
    settings = ("algorithm=grpo", "steps=2", "debug=true", "policy.dtype=bfloat16", "eval.every=0")
    assert demo(tmp_path, model, *settings, *more).wait(patient(100)) == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_2_varlen_attention_with_parents_and_fewer_key_value_heads(kind, tmp_path):
    """Values and gradients in bfloat16 against padded attention in float32: as near as padded attention in bfloat16."""
    path = tiny(kind, tmp_path, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    ids = torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(0))
    starts, parents = torch.tensor([0, 90, 130, 131, 400]), torch.tensor([-1, 0, 0, 1])
    first = [0, 90, 90, 130]
    positions = torch.cat([torch.arange(b - a) + f for a, b, f in zip(starts[:-1], starts[1:], first, strict=True)])
    direction = torch.randn(400, 260, generator=torch.Generator().manual_seed(1))

    def run(dtype, device):
        model = build_model(path, dtype, device)
        packing = Packing.of(starts, parents, torch.device(device), dtype)
        place = {"input_ids": ids[None].to(device), "position_ids": positions[None].to(device)}
        out = model(**place, packing=packing).logits[0].float()
        (out * direction.to(device)).sum().backward()
        return [out.detach().cpu(), *(p.grad.float().cpu() for p in model.parameters())]

    exact, rounded, ours = run(torch.float32, "cpu"), run(torch.bfloat16, "cpu"), run(torch.bfloat16, DEVICE)
    errors = [(relative(got, want), relative(near, want)) for want, near, got in zip(exact, rounded, ours, strict=True)]
    worst = max(ours / (2 * cpus + 1e-3) for ours, cpus in errors)
    note("varlen", model=kind, worst=float(worst), values=float(errors[0][0]), values_cpu=float(errors[0][1]))
    assert worst < 1, errors


def test_2_a_hybrid_in_packed_rows_and_in_our_engine(tmp_path):
    """Float32 on the device against each row alone on the CPU: logits, gradients, and the logprobs of answers."""
    path = tiny("qwen3_5_text", tmp_path, **HYBRID)
    ids, lengths = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(0)), (70, 1, 129)

    def run(device, *packed):
        model, found = build_model(path, torch.float32, device), []
        for row, many in zip(ids.split([sum(many) for many in packed]), packed, strict=True):
            starts, parents = torch.tensor([0, *accumulate(many)]), torch.full((len(many),), -1)
            place = {
                "position_ids": torch.cat([torch.arange(n) for n in many])[None].to(device),
                "packing": Packing.of(starts, parents, torch.device(device), torch.float32),
                "seq_idx": Segments.of(starts, parents, torch.device(device)),
            }
            found.append(model(input_ids=row[None].to(device), **place).logits[0].log_softmax(-1))
        logprobs = torch.cat(found).gather(1, ids[:, None].to(device))
        logprobs.mean().backward()
        return model, [logprobs.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]

    model, exact = run("cpu", *((n,) for n in lengths))
    errors = [float(relative(got, want)) for got, want in zip(run(DEVICE, lengths)[1], exact, strict=True)]
    engine, worst = NativeEngine(empty_module(path, torch.float32, DEVICE), max_running=8, kv_tokens=4096), 0.0
    engine.load(weights_of(model).items(), version=1)
    prompts = {f"{n}": list(range(3, 20 + n)) for n in range(12)}
    for id, prompt in prompts.items():
        engine.add(Request(id, array("i", prompt), 16, 1.0, int(id)))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    while engine.num_unfinished:
        for done in engine.step():
            tokens = done.token_ids.tolist()
            with torch.no_grad():
                logits = plain(torch.tensor([[*prompts[done.id], *tokens]]), use_cache=False).logits[
                    0, -len(tokens) - 1 : -1
                ]
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            worst = max(worst, float((torch.tensor(done.logprobs.tolist()) - wanted).abs().max()))
    note("hybrid", values=errors[0], gradients=max(errors[1:]), engine=worst)
    assert max(errors) < 1e-4 and worst < 1e-4


def test_2_decode_steps_as_graphs(tmp_path):
    """Answers of our engine, float32, against the same engine on the CPU: rows come and go, and cross 128 tokens."""
    path = tiny("qwen3", tmp_path)
    model, found = build_model(path, torch.float32, "cpu"), []
    for device in ("cpu", DEVICE):
        engine = NativeEngine(empty_module(path, torch.float32, device), 10, 4096, offload=True)
        engine.load(weights_of(model).items(), version=1)
        for round in range(2):
            with engine.awake():
                for n in range(14):
                    prompt = array("i", range(3 + n, 80 + 5 * n))
                    engine.add(Request(f"{round}-{n}", prompt, 20 + 4 * n, 1.0, 100 * round + n))
                done = {}
                while engine.num_unfinished:
                    done |= {end.id: end for end in engine.step()}
                found.append([done[id] for id in sorted(done)])
        replayed = engine.graphs.num_replayed if engine.graphs else 0
    pairs = [*zip(found[0], found[2], strict=True), *zip(found[1], found[3], strict=True)]
    same = sum(a.token_ids == b.token_ids for a, b in pairs)
    worst = max(abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True))
    note("graphs", same=same, of=len(pairs), worst=worst, replayed=replayed)
    assert same == len(pairs) and worst < 1e-4 and (REHEARSED or replayed > 50)


def test_2_rotary_tables_of_engine_and_trainer_are_equal(tmp_path):
    """A last bit that differs would grow with the position: both compute the tables on the CPU."""
    path = shape("1.7b", tmp_path / "model")
    ours = dict(empty_module(path, torch.bfloat16, DEVICE).named_buffers())
    theirs = dict(shape_on_meta(path, torch.float32).named_buffers())
    assert ours.keys() == theirs.keys()
    assert all(ours[name].device.type == DEVICE.type for name in ours)
    assert all(torch.equal(ours[name].cpu(), table) for name, table in theirs.items())


def test_2_the_logprob_head(tmp_path):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 256, generator=generator) / 8 for n in (700, 50_000))
    targets, found = torch.randint(0, 50_000, (700,), generator=generator), {}
    for device in ("cpu", DEVICE):
        leaves = [x.to(device, copy=True).requires_grad_() for x in (hidden, weight)]
        logprobs, entropy = token_logprobs(*leaves, targets.to(device), 0.7)
        (logprobs.sum() + entropy.sum()).backward()
        found[device] = [x.detach().cpu() for x in (logprobs, entropy, *(leaf.grad for leaf in leaves))]
    errors = [float(relative(got, want)) for got, want in zip(found[DEVICE], found["cpu"], strict=True)]
    note("logprob head", errors=[float(f"{e:.2g}") for e in errors])
    assert max(errors) < 1e-3, errors


def test_2_twenty_round_trips_to_the_host_keep_every_bit():
    sizes = (3, 2**12 + 1, 10**4, 5) if REHEARSED else (3, 2**24 + 1, 10**7, 5)
    tensors = [torch.randn(n, device=DEVICE) for n in sizes]
    before, moved = [fingerprint(t) for t in tensors], Offload(tensors)
    for _ in range(20):
        moved.changed()
        moved.to_host()
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
        moved.to_device()
    assert [fingerprint(t) for t in tensors] == before
    gigabytes = sum(t.nbytes for t in tensors) / 1e9
    moved.changed()
    out = seconds(moved.to_host)
    note("offload", to_host_gb_per_s=gigabytes / out, to_device_gb_per_s=gigabytes / seconds(moved.to_device))


def test_2_checksums_of_large_tensors():
    """A fingerprint is the same twice and for a copy, and another one when a sign changes."""
    tensor = torch.randn((2**10 if REHEARSED else 2**30) + 3, device=DEVICE, dtype=torch.bfloat16)
    first = fingerprint(tensor)
    assert fingerprint(tensor) == first == fingerprint(tensor.clone())
    note("fingerprint", gb_per_s=tensor.nbytes / 1e9 / seconds(lambda: fingerprint(tensor)))
    tensor[-1] = -tensor[-1]
    assert fingerprint(tensor) != first


# For 80 GB by `--plan`: activations of 32,768 tokens take 45 GB at 0.5b, 87 at 1.7b, 46 at 3b (selective)
UPDATES = [("0.5b", 32768, "none"), ("0.5b", 8192, "none"), ("1.7b", 32768, "full"), ("1.7b", 8192, "none")]
UPDATES += [("3b", 16384, "full"), ("3b", 8192, "selective")]


def speed_of_an_update(name, budget, kept, tmp_path, **train):
    """Note the speed of an update on 64 samples of 1,024 tokens."""
    with one_rank(tmp_path / "run") as world:
        path, loss = shape(name, tmp_path / "model"), bind_loss(AlgorithmConfig())
        policy = trainer(world, path, tokens_per_microbatch=budget, activation_checkpointing=kept, **train)
        batch = samples(64, 256, 768)
        first = seconds(lambda: policy.update(batch, loss, 1.0))
        peak_gb()
        took = min(seconds(lambda: policy.update(batch, loss, 1.0)) for _ in range(2))
        lengths = batch.starts.diff().tolist()
        answers = batch.loss_mask.sum().item() // len(lengths)
        rows = np.zeros(len(lengths), ANSWER)
        rows["ticket"], rows["num_tokens"], rows["num_answer_tokens"] = range(len(lengths)), lengths, answers
        rows["num_prompt_tokens"] = rows["num_tokens"] - answers
        flops = 3 * forward_flops(policy.size, rows)  # recomputed activations are none
        speed = {"tokens_per_s": batch.num_tokens / took, "tflops": flops / took / 1e12, "peak_gb": peak_gb()}
        note("update", model=name, budget=budget, kept=kept, **train, seconds=took, first_seconds=first, **speed)
        policy.close()


@pytest.mark.parametrize(("name", "budget", "kept"), UPDATES)
def test_3_speed_and_memory_of_an_update(name, budget, kept, tmp_path):
    speed_of_an_update(name, budget, kept, tmp_path)


def test_3_compiled(tmp_path):
    speed_of_an_update("0.5b", 8192, "none", tmp_path, compile=True)


def test_3_waits_of_an_update(tmp_path):
    """The CPU waits no more often for the device when there are more micro-batches."""
    found = {}
    with one_rank(tmp_path / "run") as world:
        path, loss = shape("0.5b", tmp_path / "model"), bind_loss(AlgorithmConfig())
        for budget in (16384, 4096):
            policy, batch = trainer(world, path, tokens_per_microbatch=budget), samples(16, 256, 768)
            policy.update(batch, loss, 1.0)
            found[budget] = waits(lambda p=policy, b=batch: p.update(b, loss, 1.0))
            policy.close()
    note("waits", **{str(budget): count for budget, count in found.items()})
    assert found[4096] <= found[16384] + 3, found  # three more micro-batches


def test_3_one_answer_of_32k_tokens(tmp_path):
    with one_rank(tmp_path / "run") as world:
        policy = trainer(world, shape("0.5b", tmp_path / "model"), activation_checkpointing="full")
        batch = samples(1, 512, 32256)
        assert policy.update(batch, bind_loss(AlgorithmConfig()), 1.0)["skipped"] == 0
        took = seconds(lambda: policy.update(batch, bind_loss(AlgorithmConfig()), 1.0))
        note("32k answer", update_seconds=took, logprobs_seconds=seconds(lambda: policy.logprobs(batch, 1.0)))


def test_4_a_publish_of_3b(tmp_path):
    """The seconds of gathering and hashing, and those in which the memory is read once."""
    path = shape("3b", tmp_path / "model")
    with one_rank(tmp_path / "run") as world:
        policy = trainer(world, path)
        publish = weights.build(policy, native(world, path, max_running=8, kv_tokens=4096), world, 0)
        publish(version=0)
        metrics = publish(version=1)
        note("publish", **metrics, floor_seconds=metrics["publish/bytes"] / 3e12)


@pytest.mark.parametrize("name", ["0.5b", "1.7b"])
def test_4_speed_of_our_own_decoding(name, tmp_path):
    """Tokens per second, as a share of the speed at which each step reads the weights once."""
    path, new = shape(name, tmp_path / "model"), 4 if REHEARSED else 64
    with one_rank(tmp_path / "run") as world:
        policy = trainer(world, path)
        engine = native(world, path, max_running=256, kv_tokens=256 * 256)
        weights.build(policy, engine, world, 0)(version=0)
        for running in (8, 64, 256):
            for round in range(2):  # the first one loads kernels
                prompts = [array("i", [i % 250, *range(3, 66)]) for i in range(running)]
                for i, prompt in enumerate(prompts):
                    engine.add(Request(f"{running}-{round}-{i}", prompt, new, 1.0, seed=i))
                synchronize()
                began, tokens = time.perf_counter(), 0
                while engine.num_unfinished:
                    tokens += sum(len(done.token_ids) for done in engine.step())
                took = time.perf_counter() - began
            floor = new * 2 * policy.size.read / 3e12
            note("native decode", model=name, running=running, tokens_per_s=tokens / took, of_roofline=floor / took)


@has_smollm2
def test_5_the_demo_learns(tmp_path):
    """Held-out answers after some steps of GRPO are better than before."""
    assert demo(tmp_path, f"steps={1 if REHEARSED else 12}").wait(patient(110)) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    scores = [row["val/score/mean"] for row in rows if "val/score/mean" in row]
    note("demo", first=scores[0], last=scores[-1])
    assert REHEARSED or scores[-1] > scores[0] + 0.2


@has_smollm2
def test_5_a_stop_inside_an_update_is_reported(tmp_path):
    """A process that was stopped goes on, since its own stop counts as no stall."""
    limits = ("reward.reasoning_gym.timeout=1", "journal.stall_seconds=10")
    process = demo(tmp_path, "steps=50", *limits, stderr=subprocess.DEVNULL)
    journal, deadline = tmp_path / "run" / "journal" / "rank-0.jsonl", time.monotonic() + patient(100)
    while not (journal.exists() and '"phase":"update"' in journal.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(5)
    assert process.poll() is None
    process.terminate()
    assert process.wait(patient(30)) != 0
