"""Runs compared on one page: seeds as a band, one colour a line, and a table of last and best values."""

import json
from pathlib import Path

import pytest
import yaml

from spmd_rl.tools.compare import differences, lanes, main
from spmd_rl.track.run_reader import RunData, read_run
from tests.browser import data_in
from tests.synthetic import make_run


def make(path: Path, name: str, seed: int = 0, lr: float = 1e-5, num_steps: int = 12) -> Path:
    run_dir = make_run(path, num_steps=num_steps, seed=seed)
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    settings["run"]["name"], settings["policy"]["lr"] = name, lr
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    return run_dir


@pytest.fixture
def four(tmp_path: Path) -> list[Path]:
    """Three seeds of one setting, of which one run is shorter, and one run of another."""
    seeds = [make(tmp_path / f"s{seed}", f"base-{seed}", seed, num_steps=12 - 3 * seed) for seed in range(3)]
    return [*seeds, make(tmp_path / "other", "fast", lr=1e-4)]


def test_seeds_are_one_lane(four: list[Path]) -> None:
    found = lanes([read_run(path) for path in four])
    assert [lane.name for lane in found] == ["base (3 seeds)", "fast"]
    assert differences(found) == ["policy.lr=1e-05", "policy.lr=0.0001"]
    mean, low, high = found[0].points("critic/score/mean")
    assert [step for step, _ in mean] == list(range(1, 7))
    values = [dict(run.series("critic/score/mean"))[3] for run in found[0].runs]
    assert (mean[2][1], low[2][1], high[2][1]) == (pytest.approx(sum(values) / 3), min(values), max(values))


def test_a_run_that_repeats_a_seed_has_a_row_of_its_own(four: list[Path], tmp_path: Path) -> None:
    again = make(tmp_path / "again", "base-0", 0)
    found = lanes([read_run(path) for path in (*four, again)])
    assert [lane.name for lane in found] == ["base (3 seeds)", "fast", "base-0"]
    twice = lanes([read_run(path) for path in (four[0], again)])
    assert [lane.name for lane in twice] == [f"base-0 ({four[0]})", f"base-0 ({again})"]


def test_many_settings_that_differ_are_all_shown(four: list[Path]) -> None:
    for number, path in enumerate(four[:2]):
        settings = yaml.safe_load((path / "config.yaml").read_text())
        settings |= {"algorithm": dict.fromkeys("abcdef", number), "warmup": {"steps": number}}
        (path / "config.yaml").write_text(yaml.safe_dump(settings))
    told = differences(lanes([read_run(path) for path in four[:2]]))
    assert [words.rpartition(", ")[2] for words in told] == ["warmup.steps=0", "warmup.steps=1"]


def test_a_setting_that_changed_on_the_way_is_shown_with_both_values(four: list[Path]) -> None:
    path = four[0] / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["about"]["until"] = [{"step": 4, "settings": {"policy.lr": 3e-5}}]
    path.write_text(yaml.safe_dump(settings))
    found = lanes([read_run(path) for path in (four[0], four[1])])
    assert differences(found) == ["policy.lr=3e-05 to step 4, then 1e-05", "policy.lr=1e-05"]


def test_columns_that_no_run_has_are_left_out(four: list[Path], tmp_path: Path, capsys) -> None:
    for run in four[:2]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = [{key: value for key, value in line.items() if not key.startswith("val/")} for line in lines]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert main([*map(str, four[:2]), "--out", str(tmp_path / "out.html")]) == 0
    told = capsys.readouterr().out
    assert "val/" not in told and "critic/score/mean" in told
    assert main([*map(str, four), "--out", str(tmp_path / "out.html")]) == 0
    assert "val/" in capsys.readouterr().out


def test_many_runs_have_as_many_names() -> None:
    runs = [RunData(Path(f"r{i}"), [], {"policy": {"lr": i}, "steps": 1}, {}, {}) for i in range(20)]
    found = lanes([*runs, RunData(Path("elsewhere/r3"), [], {"policy": {"lr": 99}, "steps": 1}, {}, {})])
    assert len({lane.name for lane in found}) == 21


def test_the_page_and_the_table(four: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "compare.html"
    assert main([*map(str, four), "--out", str(out)]) == 0
    data, names = data_in(out), [*map(str, four)]
    assert data["compare"]["lanes"] == [
        {"name": "base (3 seeds)", "runs": names[:3]},
        {"name": "fast", "runs": names[3:]},
    ]
    assert [run["run"] for run in data["runs"]] == list(data["run"]) == list(data["overview"]) == names
    assert [len(data["series"][name]["actor/entropy"]) for name in names] == [12, 9, 6, 12]
    assert data["compare"]["rows"][1][:3] == ["fast", "policy.lr=0.0001", "12"] and data["compare"]["keys"] == []
    told = capsys.readouterr().out
    assert "base (3 seeds)" in told and "policy.lr=0.0001" in told and str(out) in told


def test_a_directory_in_which_no_run_has_begun_is_left_out(four: list[Path], tmp_path: Path, capsys) -> None:
    (tmp_path / "early").mkdir()
    out = ["--out", str(tmp_path / "out.html")]
    assert main([str(tmp_path / "early"), *map(str, four), *out]) == 0
    assert capsys.readouterr().err == f"{tmp_path}/early: left out, no run has begun in it\n"
    assert main([str(tmp_path / "early"), *out]) == main([str(tmp_path / "no"), str(four[0]), *out]) == 2


def test_the_page_draws_the_keys_that_were_asked_for(four: list[Path], tmp_path: Path, capsys) -> None:
    out, keys = tmp_path / "compare.html", ["actor/entropy", "time/total", "no/such"]
    assert main([*map(str, four), "--out", str(out), "--keys", *keys]) == 0
    found = data_in(out)["compare"]
    assert found["keys"] == keys and len(found["columns"]) == 3 + 2 * len(keys)
    assert "time/total" in capsys.readouterr().out


def test_names_of_runs_are_mere_text(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    name = "[red]a\x1b[2J\x7f\x9b\u202e\nerror: forged"
    assert main([str(make(tmp_path / "run", name)), "--out", str(tmp_path / "out.html")]) == 0
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out) and "[red]a" in out.replace("\n", "")
    assert not [line for line in out.splitlines() if line.startswith("error:")]
    assert data_in(tmp_path / "out.html")["compare"]["lanes"][0]["name"] == name


@pytest.mark.parametrize("words", [["nowhere"], ["s0", "--keys", "no/such"]])
def test_what_cannot_be_compared(four: list[Path], tmp_path: Path, words: list[str], capsys) -> None:
    assert main([str(tmp_path / words[0]), *words[1:], "--out", str(tmp_path / "out.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "Errno" not in error


def test_a_page_is_written_as_html_alone(four: list[Path], tmp_path: Path, capsys) -> None:
    assert main([str(four[0]), "--out", str(tmp_path / "curves.svg")]) == 2
    assert "must end with .html" in capsys.readouterr().err and not (tmp_path / "curves.svg").exists()
