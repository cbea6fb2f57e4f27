"""The page in a headless Chromium, with a server and with its data inside; skipped where there is none."""

import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from spmd_rl.distributed import Journal
from spmd_rl.tools import compare
from spmd_rl.track.metrics import MetricsFile
from spmd_rl.track.report import FOLDER, write_report
from spmd_rl.track.samples import SampleLog, SampleRow
from tests.agent_run import encoder, make_agent_run, write_step
from tests.browser import CHROMIUM, served, visit
from tests.synthetic import make_run

EVIL = "</script><img src=x onerror=\"console.error('run by the page')\"><b id=evil>&lt;"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def texts(page: str, classes: str) -> list[str]:
    """What stands in the elements of these classes, which hold text alone."""
    return [
        re.sub(r"<[^>]*>", "", found)
        for found in re.findall(rf'class="{classes}"[^>]*>(.*?)</(?:pre|code)>', page, re.S)
    ]


def test_a_trajectory_is_shown_as_it_was_and_followed(tmp_path: Path) -> None:
    run_dir = make_agent_run(tmp_path / "run", written=1)
    with served(run_dir) as server:
        page = visit(f"{server.url}#step=1&ticket=9&answer=2&color=version", tmp_path / "profile")
        lines = (run_dir / "samples" / "step-000001.jsonl").read_bytes().splitlines()
        row = msgspec.json.decode(lines[10], type=SampleRow)
        assert "ticket 9, answer 2" in page and "8 trajectories" not in page and "64 trajectories" in page
        assert texts(page, "board") == [turn.step.board for turn in row.turns]
        assert texts(page, "action") == [turn.step.action for turn in row.turns if turn.step.action]
        shown = [turn.text.replace("<", "&lt;").replace(">", "&gt;") for turn in row.turns]
        assert [text.removesuffix("&lt;|im_end|&gt;") for text in texts(page, "tokens")] == shown

        answer, asked = server.data.answers["run"], []

        def grow(query):
            """The run writes its second step between two looks of the page."""
            asked.append(query)
            if len(asked) == 2:
                write_step(run_dir, 2, encoder(tmp_path / "model"), 3)
            return answer(query)

        server.data.answers["run"] = grow
        page = visit(f"{server.url}#tab=samples", tmp_path / "profile")
        assert "step 2 of 3" in page and "ticket 16, answer 0" in page


def test_the_strip_of_a_run_that_goes_on(tmp_path: Path) -> None:
    run_dir = make_agent_run(tmp_path / "run", written=2)
    MetricsFile(run_dir / "metrics.jsonl").append(3, {"actor/skipped": 1.0})
    journal = Journal(run_dir / "journal", 0, size=1, pid=os.getpid(), host=os.uname().nodename)
    journal.set_step(4)
    with journal.phase("generate"), served(run_dir) as server:
        page = visit(f"{server.url}#tab=samples", tmp_path / "profile").partition('<div id="live">')[2]
        strip = re.sub(r"<[^>]*>", " ", page.partition('<main id="sheet">')[0])
        assert strip.split()[:3] == ["running", "skipped", "step"] and "rank 0" in strip and "generate" in strip
        journal.note("end")
        strip = visit(f"{server.url}#tab=overview", tmp_path / "profile").partition('<div id="live">')[2]
        assert "ended" in strip.partition('<main id="sheet">')[0] and "rank 0" not in strip.partition("<main")[0]


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    run_dir = make_agent_run(tmp_path / "run", written=1)
    path = run_dir / "samples" / "step-000001.jsonl"
    row = msgspec.json.decode(path.read_bytes().splitlines()[0], type=SampleRow)
    ids = encoder(tmp_path / "model")(EVIL)
    row.turns = row.turns[:1]
    row.turns[0].token_ids = row.turns[0].prompt_ids = ids
    row.turns[0].logprobs, row.turns[0].versions = [-1.0] * len(ids), [0] * len(ids)
    row.turns[0].step = msgspec.structs.replace(
        row.turns[0].step, action=EVIL, observation=EVIL, board=EVIL + "!", metrics={EVIL: 1.0}
    )
    row.domain = row.ground_truth = row.reject_reason = EVIL
    row.verdict, row.kept = (
        {"status": EVIL, "score": 1.0, "parts": {EVIL: 1.0, f"stop/{EVIL}": 1.0}, "detail": EVIL},
        False,
    )
    log = SampleLog(run_dir / "samples", 0, 1)
    log.write(1, [row])
    log.merge(1)
    settings = (
        (run_dir / "config.yaml").read_text().replace("frozen-lake-grpo", f"'{EVIL}'".replace("'run by the page'", "1"))
    )
    (run_dir / "config.yaml").write_text(settings)
    with served(run_dir) as server:
        for view in ("one", "group"):
            page = visit(
                f"{server.url}#step=1&ticket={row.ticket}&answer={row.answer}&view={view}", tmp_path / "profile", 1
            )
            assert page.count("onerror=") > 8 and "<img" not in page and "id=evil" in page and 'id="evil"' not in page
    path.write_text(path.read_text().replace('"status":"</script>', '"status":"ok","was":"</script>'))
    page = visit(f"{write_report(run_dir).as_uri()}#tab=samples&view=best&kind=step&step=1", tmp_path / "profile", 1)
    assert page.count("onerror=") > 8 and "<img" not in page and 'id="evil"' not in page


def test_a_report_draws_curves_times_timeline_and_samples(tmp_path: Path) -> None:
    report = write_report(make_run(tmp_path / "run")).as_uri()
    page = visit(report, tmp_path / "profile", 2)
    # Curves of eight charts and of any metric, without a request.
    assert page.count("<figure") == 9 and page.count("<polyline") == 10
    for words in (
        "rlvr, 12 of 12 steps in",
        "torchrun --nproc-per-node 2",
        "held-out, greedy",
        "Engine against trainer",
    ):
        assert words in page, words
    assert re.search(r"generate [\d.]+ %", page)
    assert page.count('class="striped"') > 2 and page.count('class="pale"') > 2
    assert re.search(r"<title>rank 1, step 12: train, compute [\d.]+ s</title>", page)
    assert re.search(r"<td>rank 0</td><td>[\d.]+ s . [\d.]+ %</td>", page) and "policy:" in page
    page = visit(f"{report}#tab=samples", tmp_path / "profile", 2)
    assert "Best of step 12" in page and "Worst of step 12" in page and page.count('class="column"') == 6
    assert "6 of 64 trajectories" in page and "State the final answer to the following" in page


def test_runs_compared_are_one_line_each_and_seeds_a_band(tmp_path: Path) -> None:
    runs = [str(make_run(tmp_path / f"s{seed}", 12 - seed, seed=seed)) for seed in range(2)]
    out = tmp_path / "compare.html"
    assert compare.main([*runs, "--out", str(out)]) == 0
    page = visit(out.as_uri(), tmp_path / "profile", 2)
    assert page.count("<figure") == page.count("<polygon") == page.count("<polyline") == 9
    page = visit(f"{out.as_uri()}#tab=overview&run={runs[1]}", tmp_path / "profile", 2)
    assert "rlvr, 11 of 11 steps" in page and page.count("<polyline") == 10


def test_numbers_of_an_axis(tmp_path: Path) -> None:
    asked = """[ticks(0, 1, 4), ticks(0, 3, 8, true), ticks(-1.2, 1.1, 4), labels([5.54, 5.545, 5.55]),
        [0, 0.25, 1200, 15000, 2e-5, 2.5e6, 1234.56].map((value) => label(value)), padded([0.2, 0.9]), padded([7, 7]),
        smooth([[0, 2], [1, 4]])]"""
    scripts = "".join((FOLDER / name).read_text() for name in ("dom.js", "charts.js"))
    (tmp_path / "page.html").write_text(
        '<body><pre></pre><script id="data" type="application/json">{}</script><script>'
        f'{scripts}\ndocument.querySelector("pre").textContent = JSON.stringify({asked})</script>'
    )
    shown = visit((tmp_path / "page.html").as_uri(), tmp_path / "profile", 1)
    assert json.loads(re.search(r"<pre>(.*?)</pre>", shown, re.S)[1]) == [
        [0, 0.25, 0.5, 0.75, 1],
        [0, 1, 2, 3],
        [-1, -0.5, 0, 0.5, 1],
        ["5.54", "5.545", "5.55"],
        ["0", "0.25", "1200", "15k", "0.00002", "2.5M", "1235"],
        [0, 1],
        [6.3, 7.7],
        [[0, 3], [1, 3]],
    ]
