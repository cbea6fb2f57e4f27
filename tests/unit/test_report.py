"""The report on made-up runs: whole, self-contained, quick, and true to the numbers."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from spmd_rl.config.schema import RlvrConfig, RunConfig
from spmd_rl.distributed import solo
from spmd_rl.tools import report
from spmd_rl.track import render
from spmd_rl.track.messages import interrupted
from spmd_rl.track.metrics import describe
from spmd_rl.track.results import write_results
from spmd_rl.track.run import Run
from spmd_rl.track.run_reader import best_and_worst, read_run
from spmd_rl.track.svg import Series, label, labels, line_chart, padded, smooth, thin, ticks
from spmd_rl.track.timeline import Span, coalesce, read_journals, seconds_by_kind, spans
from tests.agent_run import bytes_tokenizer, make_agent_run
from tests.synthetic import make_run

VOID = {"meta", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """Checks that tags are balanced; keeps text, tags and attribute values."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.values: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.values += [value or "" for _, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def draw(run_dir: Path) -> Page:
    return Page(render.write_report(run_dir).read_text())


def test_the_page_tells_the_run(run_dir: Path) -> None:
    page = draw(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0]["val/score/mean"], lines[-1]["val/score/mean"]
    for words in (
        "smollm2-135m-grpo-1f0c",
        "torchrun --nproc-per-node 2 -m spmd_rl.rlvr",
        f"{first:.2f} \u2192 {last:.2f}",
        "rlvr, 12 of 12 steps",
        "seed",
        "2 x Intel Xeon, 24 GiB",
        "Gradient norm",
        "Entropy",
        "Answer length",
        "Engine against trainer",
        "rank 1",
        "Best of step 12",
        "Worst of step 12",
        "config.yaml",
        "policy:",
    ):
        assert words in page.text, words
    assert page.seen.count("svg") == 9 and page.seen.count("article") == 6
    assert not list(run_dir.glob(".report*"))


def test_the_page_needs_no_network_and_runs_no_script(run_dir: Path) -> None:
    page = draw(run_dir)
    text = (run_dir / "report.html").read_text()
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    assert not re.search(r"(https?:)?//\w|url\(|@import", text)
    assert any("default-src 'none'" in value for value in page.values)


def test_what_a_model_says_is_not_markup(run_dir: Path) -> None:
    path = run_dir / "samples" / "step-000012.jsonl"
    path.write_text(path.read_text().replace("State the final", "</pre><script>alert(1)</script>"))
    page = draw(run_dir)
    assert "script" not in page.seen and "<script>alert(1)" in page.text


@pytest.mark.parametrize("missing", ["samples/step-000012.jsonl", "journal/rank-0.jsonl", "metrics.jsonl"])
def test_a_page_without_a_part_of_the_run(run_dir: Path, missing: str) -> None:
    (run_dir / missing).unlink()
    assert "smollm2" in draw(run_dir).text


def test_a_run_that_was_cut_short(run_dir: Path) -> None:
    for name in ("metrics.jsonl", "journal/rank-1.jsonl"):
        path = run_dir / name
        path.write_text(path.read_text()[:-37])
    assert "rank 1" in draw(run_dir).text


def test_a_real_run_draws_its_report(tmp_path: Path) -> None:
    cfg = RlvrConfig(steps=2, run=RunConfig(name="toy", dir=str(tmp_path)))
    with solo(tmp_path) as world, Run.open(cfg, world) as track:
        for step in range(3):
            with track.step(step), world.phase("update"):
                track.add({"critic/score/mean": step / 4})
    page = Page((tmp_path / "report.html").read_text())
    assert "toy" in page.text and "0.00 \u2192 0.50" in page.text and "pytest" in page.text


def test_ten_thousand_steps_are_drawn_in_time(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=10_000)
    began = time.process_time()
    size = render.write_report(run_dir).stat().st_size
    assert time.process_time() - began < 1.5
    assert size < 2_000_000


def test_the_command_line(run_dir: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main([str(run_dir)]) == 0
    assert report.main([str(run_dir / "nowhere")]) == 2 and "no run is there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        report.main([])


def test_samples_of_any_step_and_of_evaluations_are_shown(run_dir: Path, capsys: pytest.CaptureFixture) -> None:
    last = (run_dir / "samples" / "step-000012.jsonl").read_text()
    for step in range(1, 12):
        (run_dir / "samples" / f"step-{step:06d}.jsonl").write_text(last)
    row = json.loads(last.splitlines()[0])
    row["turns"][0]["text"], row["greedy"] = "a held-out answer", True
    row["kept"], row["reject_reason"] = False, "held out"
    (run_dir / "samples" / "eval-000010.jsonl").write_text(json.dumps(row) + "\n")
    page = draw(run_dir)
    assert "Worst of step 1" in page.text and "Worst of step 12" in page.text and "Worst of step 2" not in page.text
    assert "Held-out samples" in page.text and "a held-out answer" in page.text and "greedy" in page.text
    assert report.main([str(run_dir), "--steps", "2", "10"]) == 0
    text = Page((run_dir / "report.html").read_text()).text
    assert "Worst of step 2" in text and "Worst of step 12" not in text and "a held-out answer" in text


def test_equal_scores_have_no_best_and_no_worst(run_dir: Path) -> None:
    path = run_dir / "samples" / "step-000012.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["verdict"]["score"] = 0.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = draw(run_dir)
    assert "Some of step 12" in page.text and "all scores are equal" in page.text
    assert "Best of" not in page.text and "Worst of" not in page.text


def test_what_an_agent_saw_and_did_is_shown(tmp_path: Path) -> None:
    page = draw(make_agent_run(tmp_path / "run", model=bytes_tokenizer(tmp_path / "model")))
    assert "You are solving the FrozenLake puzzle." in page.text and "<|im_start|>user" in page.text
    for name in ("prompt", "answer", "action, reward +", "observation"):
        assert name in page.text


def test_a_score_of_nothing_has_no_colour_of_the_good_and_the_truth_is_told(run_dir: Path) -> None:
    path = run_dir / "samples" / "step-000012.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["verdict"]["score"], row["ground_truth"] = 0.0, "the truth of it"
        row["messages"][0]["content"] = [{"type": "text", "text": "of parts"}, {"type": "image", "path": "x"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = render.render(read_run(run_dir), [12])
    assert "--c:var(--c3)" not in shown.partition("Samples</h2>")[2]
    assert "the truth of it" in shown and "of parts\n[image]" in shown


def test_the_numbers_of_an_axis_have_room() -> None:
    """At 6 units a digit, which is more than the font takes."""
    drawn = line_chart([Series("", "", [(1, 5.548123401), (2, 5.548123409)])])
    for x, words in re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="end">([\d.]+)<', drawn):
        assert float(x) >= 6 * len(words)


def test_suspect_passes_are_listed(run_dir: Path) -> None:
    path = run_dir / "samples" / "step-000012.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["verdict"] |= {"parts": {"suspect": 1.0}, "detail": "7 different boxes"}
    assert "Suspect of step 12" not in draw(run_dir).text
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = draw(run_dir)
    assert "Suspect of step 12" in page.text and "suspect: 7 different boxes" in page.text


@pytest.mark.parametrize(
    ("scores", "best", "worst"),
    [
        ([0.0, 1.0, 0.5], [1, 2], [0]),
        ([0.0, 0.0, 1.0, 0.0], [2], [0, 1]),
        ([1.0, 0.0, 1.0, 1.0, 1.0, 1.0], [0, 2, 3], [1]),
        ([0.5, 0.5, 0.5], [0, 1], []),
    ],
)
def test_best_and_worst_are_disjoint_scored_and_different(
    tmp_path: Path, scores: list[float], best: list[int], worst: list[int]
) -> None:
    path = tmp_path / "s.jsonl"
    rows = [{"ticket": i, "verdict": {"status": "ok", "score": score}} for i, score in enumerate(scores)]
    rows.append({"ticket": 9, "verdict": {"status": "timeout", "score": 9.0}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = best_and_worst(path, 3)
    assert ([row["ticket"] for row in found.best], [row["ticket"] for row in found.worst]) == (best, worst)
    assert found.mean == pytest.approx(sum(scores) / len(scores))
    path.write_text(json.dumps(rows[-1]) + "\n")
    assert best_and_worst(path, 3) is None


def test_the_mean_of_samples_is_without_greedy_answers(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    rows = [{"verdict": {"status": "ok", "score": score}, "greedy": score == 1.0} for score in (0.25, 0.5, 1.0)]
    for some, mean in ((rows, 0.375), (rows[2:], 1.0)):
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
        assert best_and_worst(path, 3).mean == mean


def test_an_evaluation_has_no_steps_and_one_value(run_dir: Path) -> None:
    config, metrics = run_dir / "config.yaml", run_dir / "metrics.jsonl"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"steps": None}))
    line = metrics.read_text().splitlines()[0]
    metrics.write_text(line + "\n")
    text = draw(run_dir).text
    assert "rlvr in " in text and "None" not in text.partition("Settings")[0]
    assert f"{json.loads(line)['val/score/mean']:.2f}score, held-out, sampled" in text


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
    page = draw(run_dir)
    ranks = read_journals(run_dir / "journal", 3)
    for row in ranks.values():
        seconds, total = seconds_by_kind(row), sum(span.seconds for span in row)
        assert all(seconds.values())
        for spent in seconds.values():
            assert f"{spent:.2f} s \u00b7 {100 * spent / total:.1f} %" in page.text
    assert page.values.count("striped") > len(ranks) and page.values.count("pale") > len(ranks)
    assert "step 12: train, compute" in page.text and "step 12: publish, copy" in page.text


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


def test_numbers_of_an_axis() -> None:
    assert ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(0, 3, 8, whole=True) == [0, 1, 2, 3]
    assert ticks(-1.2, 1.1, 4) == [-1, -0.5, 0, 0.5, 1]
    assert [label(x) for x in (0, 0.25, 1200, 15000, 2e-5, 2.5e6)] == ["0", "0.25", "1200", "15k", "2e-05", "2.5M"]
    assert labels([5.54, 5.545, 5.55]) == ["5.54", "5.545", "5.55"]
    assert padded([0.2, 0.9]) == (0, 1)
    low, high = padded([7.0, 7.0])
    assert low < 7 < high


def test_thinning_keeps_the_mean_and_the_ends_in_place() -> None:
    points = [(float(i), float(i % 7)) for i in range(1000)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert sum(y for _, y in thinned) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert len(smooth(points)) == 1000 and smooth([(0.0, 2.0), (1.0, 4.0)]) == [(0.0, 3.0), (1.0, 3.0)]
    assert line_chart([Series("empty", "red", [])]) == ""
    assert "circle" in line_chart([Series("one", "red", [(0, 1.0)])])


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
    assert "warm-up, by demonstrations" in render.render(run)
    told = describe(1, 6, lines[1])
    assert "  demonstrated score " in told and "  score " not in told and "  score " in describe(3, 6, lines[3])


def test_a_supervised_run_shows_its_losses_and_the_last_command(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    rows = [{"step": n, "sft/loss": 3 / n, "val/loss": 4 / n, "val/rewards/margins": 0.5} for n in range(1, 5)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(run_dir / "journal" / "rank-0.jsonl", "a") as file:
        file.write('{"t":1.5,"event":"run","command":"python -m spmd_rl.sft again","ranks":2,"step":0}\n')
    page = draw(run_dir)
    assert "Loss" in page.text and "Margin" in page.text and "Accuracy" not in page.text and "Entropy" not in page.text
    assert "4.00 \u2192 1.00" in page.text and "python -m spmd_rl.sft again" in page.text


def test_an_end_in_the_middle_says_what_is_lost(tmp_path: Path) -> None:
    assert interrupted(tmp_path).startswith("there is no checkpoint yet, no finished step is lost")
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-000005\n")
    assert interrupted(tmp_path).splitlines() == [
        "the newest checkpoint is that of step 5, steps 6 to 7 are lost (checkpoint.every)",
        "the same command goes on from step 5",
    ]
    (tmp_path / "answers").mkdir()
    assert interrupted(tmp_path).splitlines()[1] == "the same command asks for the others"


def test_the_numbers_of_another_evaluation_stay(tmp_path: Path, capsys) -> None:
    for key in ("a", "a", "b"):
        write_results(tmp_path, {"": {"score/mean": 0.5}}, {"model": f"run/{key}", "key": key})
    assert json.loads((tmp_path / "evaluation-a.json").read_text())["model"] == "run/a"
    assert json.loads((tmp_path / "evaluation.json").read_text())["model"] == "run/b"
    assert capsys.readouterr().err.count("its numbers are now in") == 1
