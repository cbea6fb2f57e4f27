"""The run directory at world size 1: one line a step, whatever is killed when; samples; times; trackers."""

import json
import math
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from PIL import Image

from spmd_rl.base.errors import UserError
from spmd_rl.base.png import encode_png
from spmd_rl.config.schema import RlvrConfig, RunConfig, TrackConfig
from spmd_rl.distributed import solo
from spmd_rl.rollout.pictures import gif_of
from spmd_rl.track.metrics import MetricsFile, combine
from spmd_rl.track.run import Run
from spmd_rl.track.samples import SampleLog, SampleRow
from tests.synthetic import sample


def settings(directory: Path, **track: object) -> RlvrConfig:
    return RlvrConfig(steps=5, run=RunConfig(name="toy", dir=str(directory)), track=TrackConfig(**track))


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def rows() -> list[SampleRow]:
    return [sample(ticket, answer, random.Random(0)) for ticket in (3, 1) for answer in (1, 0)]


class Killed(BaseException):
    """Leaves a step as a kill does: nothing after it happens."""


def test_a_step_is_one_line_with_all_it_measured(tmp_path: Path) -> None:
    with solo(tmp_path) as world, Run.open(settings(tmp_path), world) as track:
        for step in range(2):
            with track.step(step):
                with world.phase("update"), world.phase("coordination"):
                    time.sleep(0.1)
                with world.phase("generate"):
                    time.sleep(0.03)
                track.add({"actor/grad_norm": 0.5})
                track.add({"tokens": 100, "generated_tokens": 4}, reduce="sum")
                track.add({"a": math.nan, "b": 2}, reduce="max")
    first, second = lines(tmp_path)
    assert (first["step"], second["step"], first["actor/grad_norm"], first["a"], first["b"]) == (0, 1, 0.5, None, 2)
    assert first["time/generate"] >= 0.03 and first["time/coordination"] >= 0.1 and first["time/train"] < 0.05
    assert first["time/checkpoint"] == 0
    assert first["system/overhead"] == pytest.approx(first["time/coordination"] / first["time/total"])
    assert first["system/tps"] == pytest.approx(100 / first["time/total"]) and "tokens" not in first
    assert first["system/generated_tps"] == pytest.approx(4 / first["time/total"])
    assert first["memory/generate/peak_bytes"] > 10**6
    for line in (first, second):
        parts = {key: value for key, value in line.items() if key.startswith("time/") and key != "time/total"}
        assert sum(parts.values()) == pytest.approx(line["time/total"])
        assert parts["time/other"] < 0.1 * line["time/total"]


def test_an_exception_writes_no_line_and_meets_nobody(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), solo(tmp_path) as world, Run.open(settings(tmp_path), world) as track:
        with track.step(0):
            pass
        with track.step(1):
            meetings = world.journal.last
            try:
                1 / 0
            finally:
                assert world.journal.last == meetings
    assert [line["step"] for line in lines(tmp_path)] == [0]
    assert (tmp_path / "report.html").exists()


def test_measuring_a_key_twice_in_a_step_is_our_mistake(tmp_path: Path) -> None:
    with solo(tmp_path) as world, Run.open(settings(tmp_path), world) as track, track.step(0):
        track.add({"a": 1})
        with pytest.raises(AssertionError, match="twice"):
            track.add({"a": 2})


def start(directory: Path, first: int, last: int, state: dict | None = None, die: int | None = None) -> dict:
    """Steps `first` to `last`; returns the state of the last one. `die`: a kill inside that step, after `state`."""
    kept: dict = {}
    with suppress(Killed), solo(directory) as world, Run.open(settings(directory), world) as track:
        if state:
            track.load_state(json.loads(json.dumps(state)))
        for step in range(first, last + 1):
            with track.step(step):
                track.log_samples(step, rows())
                track.add({"score": step / 10, "start": first})
                kept = track.state()
                if step == die:
                    raise Killed
    return kept


@pytest.mark.parametrize("die", [None, 3])
def test_a_resume_cuts_back_to_the_checkpoint(tmp_path: Path, die: int | None) -> None:
    state = start(tmp_path, 0, 2)
    start(tmp_path, 3, 5, die=die)
    start(tmp_path, 3, 4, state)
    assert [(line["step"], line["start"]) for line in lines(tmp_path)] == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3)]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [f"step-00000{n}.jsonl" for n in range(5)]


def test_a_kill_between_checkpoint_and_line_loses_neither_line_nor_samples(tmp_path: Path) -> None:
    state = start(tmp_path, 0, 2, die=2)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert not (tmp_path / "samples" / "step-000002.jsonl").exists()
    start(tmp_path, 3, 3, state)
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [0, 1, 2, 3]
    assert written[2]["score"] == 0.2
    assert len((tmp_path / "samples" / "step-000002.jsonl").read_text().splitlines()) == 4


def test_a_fresh_start_in_a_used_directory_begins_anew(tmp_path: Path) -> None:
    start(tmp_path, 0, 3)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step":4,"sco')  # torn by a kill
    start(tmp_path, 0, 1)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert not (tmp_path / "samples" / "step-000003.jsonl").exists()


def test_truncate_drops_a_torn_line_and_says_whether_the_last_is_there(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.truncate(3) is False
    for step in range(3):
        file.append(step, {"x": 0.1})
    with open(file.path, "a") as raw:
        raw.write('{"step":3,')
    assert file.truncate(3) is False and file.truncate(2) is True
    assert file.path.read_bytes().endswith(b'{"step":2,"x":0.1}\n')


def test_combine_takes_the_ranks_that_have_a_key() -> None:
    records = [{"a": 1.0, "b": 4.0}, {}, {"a": 2.0}]
    assert combine("sum", records) == {"a": 3.0, "b": 4.0}
    assert combine("mean", records) == {"a": 1.5, "b": 4.0}
    assert combine("max", records) == {"a": 2.0, "b": 4.0}


def written(keys: list[tuple[int, int]]) -> list[bytes]:
    """The lines of these samples."""
    return [msgspec.json.encode(row) + b"\n" for row in made(keys)]


def made(keys: list[tuple[int, int]]) -> list[SampleRow]:
    return [sample(ticket, answer, random.Random(f"{ticket} {answer}")) for ticket, answer in keys]


def test_parts_of_all_ranks_become_one_ordered_file(tmp_path: Path) -> None:
    logs = [SampleLog(tmp_path, rank, 3) for rank in range(3)]
    keys = [(ticket, answer) for ticket in range(10, 0, -1) for answer in range(3)]
    for rank, log in enumerate(logs):
        log.write(1, iter(made(keys[rank:20:3])))
    logs[0].merge(1)
    merged = [json.loads(line) for line in logs[0].path(1).read_text().splitlines()]
    assert [(row["ticket"], row["answer"]) for row in merged] == sorted(keys[:20])
    assert merged[0]["turns"][0]["prompt_ids"] == [9, merged[0]["ticket"], merged[0]["answer"]]
    assert logs[0].path(1).read_bytes() == b"".join(written(sorted(keys[:20])))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.jsonl"]


def test_answers_of_one_ticket_keep_their_order_whoever_holds_them(tmp_path: Path) -> None:
    held = [[(5, 0), (5, 1), (5, 6), (6, 0)], [], [(5, 2), (5, 3), (5, 7), (4, 9)], [(5, 4), (5, 5)]]
    for rank, keys in enumerate(held):
        SampleLog(tmp_path, rank, 4).write(1, made(keys))
    log = SampleLog(tmp_path, 0, 4)
    log.merge(1)
    assert log.path(1).read_bytes() == b"".join(written(sorted(sum(held, []))))


def test_a_step_of_which_nobody_logs_samples_has_no_file(tmp_path: Path) -> None:
    SampleLog(tmp_path, 0, 2).merge(1)
    assert list(tmp_path.iterdir()) == []


def test_recover_finishes_whole_sets_and_drops_the_rest(tmp_path: Path) -> None:
    for step, ranks in ((1, (0, 1)), (2, (1,))):
        for rank in ranks:
            SampleLog(tmp_path, rank, 2).write(step, made([(0, rank)]))
    SampleLog(tmp_path, 0, 1).write(3, made([(7, 1), (7, 0)]))
    (tmp_path / ".step-000002.rank-0-of-2.tmp").write_text("half")
    SampleLog(tmp_path, 0, 1).recover()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001.jsonl", "step-000003.jsonl"]
    assert (tmp_path / "step-000001.jsonl").read_bytes() == b"".join(written([(0, 0), (0, 1)]))
    assert (tmp_path / "step-000003.jsonl").read_bytes() == b"".join(written([(7, 0), (7, 1)]))


@pytest.mark.parametrize(
    ("track", "words"),
    [
        ({"swanlab": "offline"}, r"track.swanlab needs .* pip install 'spmd-rl\[swanlab\]'"),
        ({"tensorboard": True}, r"pip install 'spmd-rl\[tensorboard\]'"),
        ({"trackio": True}, r"pip install 'spmd-rl\[trackio\]'"),
    ],
)
def test_a_tracker_that_cannot_be_is_one_clear_line(
    tmp_path: Path, track: dict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmd_rl.track.trackers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=words), solo(tmp_path) as world, Run.open(settings(tmp_path, **track), world):
        pass


def test_trackers_get_the_line_and_keep_their_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []

    class Recorder:
        def __init__(self, mode: str, run_dir: Path, run_id: str, config: dict) -> None:
            seen.append((mode, run_id, config["seed"]))

        def log(self, step: int, values: dict, pictures: list[Path]) -> None:
            seen.append((step, values["score"]))

        def close(self) -> None:
            seen.append(("closed",))

    monkeypatch.setattr("spmd_rl.track.trackers.find_spec", lambda name: True)
    monkeypatch.setattr("spmd_rl.track.trackers.wandb", Recorder)
    states = []
    for first in (0, 1):
        cfg = settings(tmp_path, wandb="offline")
        with solo(tmp_path) as world, Run.open(cfg, world) as track:
            if states:
                track.load_state(states[0])
            with track.step(first):
                track.add({"score": 0.5})
                states.append(track.state())
    opened = [event for event in seen if event[0] == "offline"]
    assert len(opened) == 2 and opened[0] == opened[1]
    assert [event for event in seen if len(event) < 3] == [(0, 0.5), ("closed",), (1, 0.5), ("closed",)]


@pytest.mark.parametrize(
    "name",
    ["tensorboard", pytest.param("wandb", marks=pytest.mark.slow), pytest.param("swanlab", marks=pytest.mark.slow)],
)
def test_real_trackers_write_offline(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    cfg = settings(tmp_path, **{name: True if name == "tensorboard" else "offline"})
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with solo(tmp_path) as world, Run.open(cfg, world) as track:
        (tmp_path / "pictures").mkdir()
        for step in range(2):
            png = encode_png([bytes(range(step, 12 + step))], 2, 2)
            (tmp_path / "pictures" / f"step-{step:06d}-3-0.png").write_bytes(png)
            # A video of three frames.
            video = gif_of(torch.eye(3)[:, :, None, None].expand(3, 3, 8, 8))
            (tmp_path / "pictures" / "step-000001-4-0.gif").write_bytes(video)
            with track.step(step):
                track.add({"score": 0.5})
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    written = [path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert any(png[:29] in content for content in written), "a picture: signature and header of its PNG"
    assert any(video in content for content in written)
    with Image.open(tmp_path / "pictures" / "step-000001-4-0.gif") as image:
        assert image.n_frames == 3 and image.convert("RGB").getpixel((4, 4)) == (255, 0, 0)


def test_trackio_continues_a_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    states = []
    for first in (0, 1):
        with solo(tmp_path / "run") as world, Run.open(settings(tmp_path / "run", trackio=True), world) as track:
            if states:
                track.load_state(states[0])
            (tmp_path / "run" / "pictures").mkdir(exist_ok=True)
            png = encode_png([bytes(range(12))], 2, 2)
            (tmp_path / "run" / "pictures" / f"step-{first:06d}-3-0.png").write_bytes(png)
            with track.step(first):
                track.add({"score": 0.5 + first})
                states.append(track.state())
    (name,) = SQLiteStorage.get_runs("spmd_rl")
    lines = SQLiteStorage.get_logs("spmd_rl", name)
    assert name.startswith("run-") and [(line["step"], line["score"]) for line in lines] == [(0, 0.5), (1, 1.5)]
    assert list((tmp_path / "trackio").rglob("*.png"))


def test_a_directory_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cfg = settings(tmp_path / "file" / "run")
    with pytest.raises(UserError, match=r"run\.dir="), solo(tmp_path) as world, Run.open(cfg, world):
        pass
