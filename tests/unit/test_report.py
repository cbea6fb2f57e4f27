"""The report on made-up runs: its data, self-contained, quick, and true to the numbers."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from spmd_rl.config.schema import RlvrConfig, RunConfig
from spmd_rl.distributed import solo
from spmd_rl.tools import report
from spmd_rl.track.messages import interrupted
from spmd_rl.track.metrics import describe
from spmd_rl.track.report import write_report
from spmd_rl.track.results import write_results
from spmd_rl.track.run import Run
from spmd_rl.track.run_reader import read_run, thin
from spmd_rl.track.timeline import Span, coalesce, read_journals, seconds_by_kind, spans, timeline_data
from spmd_rl.track.trajectories import marked, mean_score, rows
from tests.agent_run import bytes_tokenizer, make_agent_run
from tests.browser import data_in
from tests.synthetic import make_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def drawn(run_dir: Path, steps: list[int] | None = None) -> dict[str, Any]:
    """The data of the report, by request, of its one run."""
    found = data_in(write_report(run_dir, steps))
    return {name: reply["."] for name, reply in found.items() if name != "runs"}


def samples_of(run_dir: Path, step: int = 12) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines()]


def write_samples(run_dir: Path, found: list[dict[str, Any]], name: str = "step-000012") -> None:
    (run_dir / "samples" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def test_the_page_tells_the_run(run_dir: Path) -> None:
    data = drawn(run_dir)
    shown = data["overview"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0]["val/score/mean"], lines[-1]["val/score/mean"]
    assert data["run"]["title"] == "smollm2-135m-grpo-1f0c" and (data["run"]["last"], data["run"]["planned"]) == (
        12,
        12,
    )
    assert shown["launch"]["command"].startswith("torchrun --nproc-per-node 2 -m spmd_rl.rlvr")
    assert (shown["launch"]["machine"], shown["launch"]["ranks"]) == ("2 x Intel Xeon, 24 GiB", 2)
    assert shown["pipeline"] == "rlvr" and shown["seconds"].endswith(" s") and shown["revision"] == "0123456789ab"
    assert [f"{first:.2f} \u2192 {last:.2f}", "score, held-out, sampled"] in shown["tiles"]
    assert {key for line in lines for key in line} - {"step"} == set(data["series"])
    assert data["series"]["actor/entropy"] == [
        [line["step"], pytest.approx(line["actor/entropy"], rel=1e-5)] for line in lines[1:]
    ]
    assert "policy:" in shown["settings"] and str(run_dir) in shown["drawn"]
    assert not list(run_dir.glob(".report*"))


def test_the_page_needs_no_network_and_runs_its_own_script_alone(run_dir: Path) -> None:
    text = write_report(run_dir).read_text()
    assert re.findall(r"<script[^>]*>", text) == ['<script id="data" type="application/json">', "<script>"]
    assert not re.search(r"(https?:)?//\w|url\(|@import|innerHTML", text.replace("http://www.w3.org/2000/svg", ""))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy and "connect-src" not in policy and "unsafe" not in policy
    assert "<noscript><p" in text


def test_what_a_model_says_is_not_markup(run_dir: Path) -> None:
    path, evil = run_dir / "samples" / "step-000012.jsonl", "</script><script>alert(1)</script><!--"
    path.write_text(path.read_text().replace("State the final", evil))
    (one, *_) = drawn(run_dir)["trajectories"]["step 12"]
    text = (run_dir / "report.html").read_text()
    assert evil in one["messages"][0]["content"] and "<script>alert" not in text and text.count("</script>") == 2


@pytest.mark.parametrize("missing", ["samples/step-000012.jsonl", "journal/rank-0.jsonl", "metrics.jsonl"])
def test_a_page_without_a_part_of_the_run(run_dir: Path, missing: str) -> None:
    (run_dir / missing).unlink()
    assert "smollm2" in drawn(run_dir)["run"]["title"]


def test_a_run_that_was_cut_short(run_dir: Path) -> None:
    for name in ("metrics.jsonl", "journal/rank-1.jsonl"):
        path = run_dir / name
        path.write_text(path.read_text()[:-37])
    data = drawn(run_dir)
    assert data["run"]["last"] == 11 and [row["rank"] for row in data["overview"]["timeline"]] == [0, 1]


def test_a_real_run_draws_its_report(tmp_path: Path) -> None:
    cfg = RlvrConfig(steps=2, run=RunConfig(name="toy", dir=str(tmp_path)))
    with solo(tmp_path) as world, Run.open(cfg, world) as track:
        for step in range(3):
            with track.step(step), world.phase("update"):
                track.add({"critic/score/mean": step / 4})
    found = data_in(tmp_path / "report.html")
    shown = found["overview"]["."]
    assert found["runs"][0]["title"] == "toy" and "pytest" in shown["launch"]["command"]
    assert ["0.00 \u2192 0.50", "score, training"] in shown["tiles"]
    assert "train" in {phase for phase, *_ in shown["timeline"][0]["spans"]}


def test_ten_thousand_steps_are_drawn_in_time(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=10_000)
    began = time.process_time()
    size = write_report(run_dir).stat().st_size
    assert time.process_time() - began < 1.5
    assert size < 2_000_000


def test_the_command_line(run_dir: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main([str(run_dir)]) == 0
    assert report.main([str(run_dir / "nowhere")]) == 2 and "not a run" in capsys.readouterr().err
    (run_dir / "samples" / "step-000012.jsonl").write_text("{")
    assert report.main([str(run_dir)]) == 2 and "step-000012.jsonl:1: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        report.main([])


def test_samples_of_any_step_and_of_evaluations_are_shown(run_dir: Path) -> None:
    last = samples_of(run_dir)
    for step in range(1, 12):
        write_samples(run_dir, last, f"step-{step:06d}")
    row = last[0]
    row["turns"][0]["text"], row["greedy"] = "a held-out answer", True
    row["kept"], row["reject_reason"] = False, "held out"
    write_samples(run_dir, [row], "eval-000010")
    data = drawn(run_dir)
    assert data["run"]["steps"] == {"step": [1, 3, 4, 6, 7, 9, 10, 12], "eval": [10]}
    assert len(data["step"]["step 3"]["rows"]) == 6 and data["step"]["step 3"]["total"] == 64
    (held_out,) = data["trajectories"]["eval 10"]
    assert held_out["segments"][0]["turns"][0]["text"] == "a held-out answer" and held_out["greedy"]
    assert report.main([str(run_dir), "--steps", "2", "10"]) == 0
    assert data_in(run_dir / "report.html")["run"]["."]["steps"] == {"step": [2, 10], "eval": [10]}


def test_of_many_tokens_the_last_steps_have_theirs(run_dir: Path) -> None:
    found = samples_of(run_dir)[:8]
    for row in found:
        (turn,) = row["turns"]
        turn |= {"token_ids": [5] * 15_000, "logprobs": [-0.123456] * 15_000, "versions": [3] * 15_000}
    write_samples(run_dir, found)
    write_samples(run_dir, found, "step-000006")
    data = drawn(run_dir)["trajectories"]
    (last, before) = ([one["segments"][0]["turns"][0] for one in data[f"step {step}"]] for step in (12, 6))
    assert [len(turn["token_ids"]) for turn in (*last, *before)] == [15_000] * 6 + [0] * 6
    assert last[0]["logprobs"][0] == -0.1235 and {turn["num_tokens"] for turn in before} == {15_000}
    assert all(turn["text"] for turn in before)


def test_what_an_agent_saw_and_did_is_shown(tmp_path: Path) -> None:
    data = drawn(make_agent_run(tmp_path / "run", model=bytes_tokenizer(tmp_path / "model")))
    turn = data["trajectories"]["step 3"][0]["segments"][0]["turns"][0]
    assert "You are solving the FrozenLake puzzle." in turn["prompt"] and "<|im_start|>user" in turn["prompt"]
    assert turn["step"]["action"] and turn["step"]["observation"] and "reward" in turn["step"]
    assert data["overview"]["timeline"] == []


def test_a_picture_is_shown_in_place_of_its_path(run_dir: Path) -> None:
    (run_dir / "pictures").mkdir()
    (run_dir / "pictures" / "1-2.png").write_bytes(b"\x89PNG")
    (run_dir / "pictures" / "3.gif").write_bytes(b"GIF89a")
    found = samples_of(run_dir)
    texts = ["pictures/1-2.png", "pictures/3.gif", "pictures/none.png", "../secret.png"]
    for text, row in zip(texts, found, strict=False):
        row["turns"][0]["text"] = text
    write_samples(run_dir, found[:4])
    shown = {
        turn["text"]: turn.get("picture")
        for one in drawn(run_dir)["trajectories"]["step 12"]
        for turn in one["segments"][0]["turns"]
    }
    assert shown.pop("pictures/3.gif") == "data:image/gif;base64,R0lGODlh"
    assert shown.pop("pictures/1-2.png") == "data:image/png;base64,iVBORw==" and set(shown.values()) <= {None}


@pytest.mark.parametrize(
    ("scores", "best", "worst", "some"),
    [
        ([0.0, 1.0, 0.5], [1, 2], [0], []),
        ([0.0, 0.0, 1.0, 0.0], [2], [0, 1], []),
        ([1.0, 0.0, 1.0, 1.0, 1.0, 1.0], [0, 2, 3], [1], []),
        ([0.5, 0.5, 0.5], [], [], [0, 1, 2]),
    ],
)
def test_best_and_worst_are_disjoint_scored_and_different(
    run_dir: Path, scores: list[float], best: list[int], worst: list[int], some: list[int]
) -> None:
    (line, *_) = samples_of(run_dir)
    found = [line | {"ticket": i, "verdict": {"status": "ok", "score": score}} for i, score in enumerate(scores)]
    found.append(line | {"ticket": 9, "verdict": {"status": "timeout", "score": 9.0, "parts": {"suspect": 1.0}}})
    write_samples(run_dir, found)
    listed = rows(run_dir / "samples" / "step-000012.jsonl")
    assert {mark: [row.ticket for row in chosen] for mark, chosen in marked(listed).items()} == {
        "best": best,
        "worst": worst,
        "some": some,
        "suspect": [9],
    }
    assert mean_score(listed) == pytest.approx(sum(scores) / len(scores))
    assert mean_score(listed[-1:]) is None and not any([*marked(listed[-1:]).values()][:3])


def test_the_mean_of_samples_is_without_greedy_answers(run_dir: Path) -> None:
    (line, *_) = samples_of(run_dir)
    found = [
        line | {"ticket": i, "verdict": {"status": "ok", "score": score}, "greedy": score == 1.0}
        for i, score in enumerate((0.25, 0.5, 1.0))
    ]
    write_samples(run_dir, found)
    listed = rows(run_dir / "samples" / "step-000012.jsonl")
    assert mean_score(listed) == 0.375 and mean_score(listed[2:]) == 1.0


def test_an_evaluation_has_no_planned_steps_and_one_value(run_dir: Path) -> None:
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    del settings["steps"]
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    line = (run_dir / "metrics.jsonl").read_text().splitlines()[0]
    (run_dir / "metrics.jsonl").write_text(line + "\n")
    data = drawn(run_dir)
    assert data["run"]["planned"] is None
    assert [f"{json.loads(line)['val/score/mean']:.2f}", "score, held-out, sampled"] in data["overview"]["tiles"]


def event(t: float, what: str, phase: str = "", **fields: str) -> dict:
    return {"t": t, "event": what, "phase": phase, "step": 1, **fields}


def test_a_nested_phase_interrupts_the_one_around_it() -> None:
    events = [event(0, "step"), event(1, "enter", "a"), event(2, "note"), event(3, "enter", "b")]
    events += [event(4, "exit", "b"), event(6, "exit", "a"), event(9, "step")]
    expected = [Span("a", "compute", 1, 1, 3), Span("b", "compute", 1, 3, 4), Span("a", "compute", 1, 4, 6)]
    assert spans(events) == expected


def test_the_innermost_kind_of_time_counts_whatever_the_phase() -> None:
    events = [event(0, "enter", "publish"), event(1, "kind", kind="copy"), event(2, "collective", kind="wait")]
    events += [event(4, "collective_done"), event(7, "kind_done"), event(8, "collective", kind="compute")]
    events += [event(9, "collective_done"), event(10, "exit", "publish"), event(10, "kind", kind="wait")]
    events += [event(11, "enter", "score"), event(14, "kind_done"), event(16, "exit", "score")]
    row = spans(events)
    kinds = [(span.kind, span.seconds) for span in row if span.phase == "publish"]
    assert kinds == [
        ("compute", 1),
        ("copy", 1),
        ("wait", 2),
        ("copy", 3),
        ("compute", 1),
        ("compute", 1),
        ("compute", 1),
    ]
    assert [(span.kind, span.seconds) for span in row if span.phase == "score"] == [("wait", 3), ("compute", 2)]
    assert seconds_by_kind(row) == {"compute": 6, "wait": 5, "copy": 4}


def test_the_page_tells_compute_wait_and_copy_of_each_rank(run_dir: Path) -> None:
    ranks, shown = read_journals(run_dir / "journal", 3), drawn(run_dir)["overview"]["timeline"]
    for row in shown:
        assert row["seconds"] == pytest.approx(seconds_by_kind(ranks[row["rank"]])) and all(row["seconds"].values())
        kinds = {(phase, kind) for phase, kind, *_ in row["spans"]}
        assert {("train", "compute"), ("publish", "copy"), ("coordination", "wait")} <= kinds
    assert {step for row in shown for _, _, step, *_ in row["spans"]} == {10, 11, 12}
    assert min(span[3] for row in shown for span in row["spans"]) == 0 and timeline_data(run_dir / "none", 3) == []


def test_short_spans_go_to_the_one_before() -> None:
    def span(phase: str, begin: float, end: float, step: int = 1, kind: str = "compute") -> Span:
        return Span(phase, kind, step, begin, end)

    row = [span("a", 0, 1), span("b", 1, 1.01), span("a", 1.01, 2), span("a", 2, 3, kind="wait"), span("c", 3, 4, 2)]
    assert coalesce(row, 0.1) == [span("a", 0, 2), span("a", 2, 3, kind="wait"), span("c", 3, 4, 2)]


def test_the_timeline_has_the_last_start_only(run_dir: Path) -> None:
    path = run_dir / "journal" / "rank-0.jsonl"
    again = [{"t": 2e9, "event": "start"}, {"t": 2e9, "event": "step", "step": 5}]
    again += [{"t": 2e9 + i, "event": e, "phase": "update", "step": 5} for i, e in enumerate(("enter", "exit"))]
    path.write_text(path.read_text() + "".join(json.dumps(event) + "\n" for event in again))
    ranks = read_journals(run_dir / "journal", 3)
    assert ranks[0] == [Span("update", "compute", 5, 2e9, 2e9 + 1)]
    assert {span.step for span in ranks[1]} == {10, 11, 12}


def test_thinning_keeps_the_mean_and_the_steps_of_all_series_equal() -> None:
    points = [(float(i), float(i % 7)) for i in range(1500)]
    thinned = thin(points, 1499)
    assert len(thinned) == 300 and thin(points[:5], 4) == points[:5]
    assert sum(y for _, y in thinned) / 300 == pytest.approx(sum(y for _, y in points) / 1500, rel=1e-5)
    assert {x for x, _ in thin(points[::7], 1499)} <= {x for x, _ in thinned}


def test_null_is_a_gap(run_dir: Path) -> None:
    lines = [{"step": 0, "x": 1.0}, {"step": 1, "x": None}, {"step": 2}, {"step": 3, "x": 2}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(run_dir).series("x") == [(0, 1.0), (3, 2)]


def test_scores_of_the_warm_up_are_those_of_demonstrations(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=6)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:3]:
        line["warmup/loss"] = 1.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert [step for step, _ in run.series("critic/score/mean")] == [3, 4, 5, 6]
    assert [step for step, _ in run.series("warmup/score/mean")] == [1, 2]
    assert [step for step, _ in drawn(folder)["series"]["warmup/score/mean"]] == [1, 2]
    told = describe(1, 6, lines[1])
    assert "  demonstrated score " in told and "  score " not in told and "  score " in describe(3, 6, lines[3])


def test_a_supervised_run_shows_its_losses_and_the_last_command(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    rows = [{"step": n, "sft/loss": 3 / n, "val/loss": 4 / n, "val/rewards/margins": 0.5} for n in range(1, 5)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(run_dir / "journal" / "rank-0.jsonl", "a") as file:
        file.write('{"t":1.5,"event":"run","command":"python -m spmd_rl.sft again","ranks":2,"step":0}\n')
    shown = drawn(run_dir)["overview"]
    assert ["4.00 \u2192 1.00", "loss, held-out"] in shown["tiles"]
    assert shown["launch"]["command"] == "python -m spmd_rl.sft again"


def test_an_end_in_the_middle_says_what_is_lost(tmp_path: Path) -> None:
    assert interrupted(tmp_path).startswith("there is no checkpoint yet, no finished step is lost")
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-000005\n")
    assert interrupted(tmp_path).splitlines() == [
        "the newest checkpoint is that of step 5, steps 6 to 7 are lost (checkpoint.every)",
        "the same command continues from step 5",
    ]
    (tmp_path / "answers").mkdir()
    assert interrupted(tmp_path).splitlines()[1] == "the same command asks for the others"


def test_the_numbers_of_another_evaluation_stay(tmp_path: Path, capsys) -> None:
    for key in ("a", "a", "b"):
        write_results(tmp_path, {"": {"score/mean": 0.5}}, {"model": f"run/{key}", "key": key})
    assert json.loads((tmp_path / "evaluation-a.json").read_text())["model"] == "run/a"
    assert json.loads((tmp_path / "evaluation.json").read_text())["model"] == "run/b"
    assert capsys.readouterr().err.count("its numbers are now in") == 1
