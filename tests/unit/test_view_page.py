"""The page of the view in a headless Chromium; skipped where there is none."""

import re
from pathlib import Path

import msgspec
import pytest

from spmd_rl.track.samples import SampleLog, SampleRow
from tests.agent_run import encoder, make_agent_run, write_step
from tests.browser import CHROMIUM, served, visit

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
