"""What the benchmarks rest on: the gate, the bare loop's arithmetic, the pictures. Not the figures."""

import json
import os
import sys
import time
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench import curves, metadata, show, soak, step_profile, work
from bench.bare_side import Loop
from bench.gate import Contestant
from tests.models import tiny
from tests.synthetic import make_run

STEPPER = """
import os, time
from bench.gate import Gate
gate, spent = Gate.connect(int(os.environ["RANK"])), 0.0
for step in range(9):
    while (order := gate.arrive(step, {"step": step - 1, "spent": spent})).do == "export":
        open(order.path, "w").write("weights")
    began = time.process_time()
    while time.process_time() - began < 0.2:
        pass
    spent = time.process_time() - began
"""


@pytest.fixture
def stepper(tmp_path):
    env = {"PYTHONPATH": str(work.ROOT), "RANK": "0"}
    with Contestant.start("stepper", [sys.executable, "-c", STEPPER], env, 1, tmp_path) as job:
        yield job


def test_a_contestant_computes_nothing_at_the_gate(stepper):
    stepper.wait()
    before = stepper.cpu_seconds()
    time.sleep(0.3)
    assert stepper.cpu_seconds() - before < 0.05
    done = [stepper.step() for _ in range(2)]
    assert [step.values["step"] for step in done] == [0, 1]
    for step in done:
        assert 0.15 < step.cpu_seconds < 0.4 and 0.2 <= step.rank_cpu_seconds < 0.4 and step.seconds >= 0.2


def test_an_export_is_no_step(stepper, tmp_path):
    stepper.wait()
    stepper.export(tmp_path / "weights")
    assert (tmp_path / "weights").read_text() == "weights"
    assert stepper.step().values["step"] == 0


def test_a_contestant_that_fails_is_told_with_its_log(tmp_path):
    program = "from bench.gate import Gate; Gate.connect(0).arrive(0, {}); raise SystemExit('out of luck')"
    env = {"PYTHONPATH": str(work.ROOT)}
    with Contestant.start("unlucky", [sys.executable, "-c", program], env, 1, tmp_path) as job:
        job.wait()
        with pytest.raises(RuntimeError, match="out of luck"):
            job.step()


def test_a_contestant_that_was_killed_is_said_to_be(tmp_path):
    program = "import os; from bench.gate import Gate; Gate.connect(0).arrive(0, {}); os.kill(os.getpid(), 9)"
    env = {"PYTHONPATH": str(work.ROOT)}
    with Contestant.start("greedy", [sys.executable, "-c", program], env, 1, tmp_path) as job:
        job.wait()
        with pytest.raises(RuntimeError, match=r"greedy ended early, with exit code -9: .* memory"):
            job.step()


def test_the_bare_loop_computes_what_plain_transformers_computes(tmp_path):
    model = tiny("llama", tmp_path / "model", tie=True)
    settings = {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0, "clip": 0.2, "max_grad_norm": 1.0}
    loop = Loop({"model": str(model), "dtype": "float32", "temperature": 0.7, **settings})
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = [list(range(1, 8)), list(range(20, 32))]
    answers = [[[40, 41, 42], [43]], [[44, 45], [46, 47, 48, 49]]]
    advantages = [[1.0, -1.0], [0.5, -0.25]]
    rows = [
        (prompt, answer, advantage)
        for prompt, group, weights in zip(prompts, answers, advantages, strict=True)
        for answer, advantage in zip(group, weights, strict=True)
    ]
    logprobs = []
    for prompt, answer, _ in rows:
        logits = plain(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / 0.7
        logprobs.append(logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0])
    in_order = [row[place] for place in range(4) for row in logprobs if place < len(row)]
    torch.testing.assert_close(loop.generate(prompts, answers), torch.stack(in_order).detach())

    loss = -sum((row * advantage).sum() for row, (_, _, advantage) in zip(logprobs, rows, strict=True)) / 10
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0).step()
    assert loop.train(prompts, answers, advantages) == 7 + 12 + 10
    for mine, theirs in zip(loop.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_trl_is_told_the_prompts_of_our_tickets(tmp_path):
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": f"say {i}", "ground_truth": str(i), "domain": "toy"} for i in range(40)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = [f"data.train={data}", "~reward.reasoning_gym", "reward.toy.target=tests.e2e.toy_reward:ParityReward"]
    cfg = work.loaded(work.settings(chosen, seed=3, steps=4, run_dir=tmp_path / "run"))
    told = work.for_trl(cfg, tmp_path, {"beta": 0.1})
    assert len(told["rows"]) == 8 * 5 and told["trl"] == {"beta": 0.1} and told["seed"] == 3
    ids = [row["id"] for row in told["rows"]]
    assert len(set(ids[:24])) == 24 and ids != sorted(ids)  # an epoch in our order, each prompt once


def test_operators_have_families():
    names = {
        "aten::mm": "matmul",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::_fused_adamw_": "optimizer",
        "aten::copy_": "copies, casts, gathers",
        "aten::mul": step_profile.ELEMENTWISE,
        "phase: update": step_profile.PYTHON,
    }
    assert {name: step_profile.family(name) for name in names} == names


def test_pictures_are_whole_documents(tmp_path):
    bars, lines = tmp_path / "bars.svg", tmp_path / "lines.svg"
    drawn = [show.Bar("a & b", [("x", 1.0), ("y", 2.0)], "(3 x)"), show.Bar("c", [("x", 0.0)])]
    show.bars(bars, "Bars", "ms", drawn, mark=(4.0, "limit"))
    show.lines(lines, "Lines", "s", "score", [show.Series("one", show.COLORS[0], [(0.0, 0.2), (9.0, 0.8)])])
    panels = tmp_path / "panels.svg"
    show.panels(
        panels, "Panels", "score", {name: [show.Series("one", "red", [(0, 0.2), (1, 0.4)])] for name in "abcde"}
    )
    show.bars(again := tmp_path / "again.svg", "Bars", "ms", drawn, mark=(4.0, "limit"))
    assert again.read_bytes() == bars.read_bytes()
    for path, words in ((bars, {"Bars", "a & b", "limit", "3 (3 x)"}), (lines, {"score"}), (panels, {*"abcde"})):
        root = ElementTree.fromstring(path.read_text())
        assert root.tag.endswith("svg") and root.get("viewBox")
        assert words <= {(text.text or "").strip() for text in root.iter("{http://www.w3.org/2000/svg}text")}


def test_curves_of_runs_have_a_panel_for_each_metric(tmp_path):
    runs = [str(make_run(tmp_path / f"s{seed}", seed=seed)) for seed in range(2)]
    curves.main([*runs, "--keys", "actor/entropy", "val/score/mean", "--svg", str(tmp_path / "curves.svg")])
    text = (tmp_path / "curves.svg").read_text()
    assert "actor/entropy" in text and "val/score/mean" in text and text.count('id="axes_') == 2


def test_threads_are_dealt_out():
    cores = len(os.sched_getaffinity(0))
    assert work.threads(1) == cores and work.threads(cores) == 1 and work.threads(8 * cores) == 1


def test_growth_is_the_slope_after_the_first_quarter():
    start = [(step, 100.0 * step) for step in range(0, 100, 20)]
    level = [(step, 9e6) for step in range(100, 400, 20)]
    assert soak.slope(start + level) == 0
    rising = [(step, 9e6 + 2048.0 * step) for step in range(0, 400, 20)]
    assert soak.slope(rising) == pytest.approx(2048) and soak.LIMIT < 2048
    assert soak.quarter(rising, 3) - soak.quarter(rising, 0) == pytest.approx(300 * 2048)


def test_metadata_of_many_ranks_is_one_whole_step() -> None:
    run = metadata.measure(ranks=3, steps=1, seed=0)
    assert run["seconds"].keys() == set(metadata.PARTS) and all(value > 0 for value in run["seconds"].values())
