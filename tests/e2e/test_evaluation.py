"""`steps=0`: an evaluation of all rows that are given, through the real door."""

import json

import pytest

from tests.e2e.runs import EXACT, Running, Toy

ROWS = 500
SETTINGS = (*EXACT, "steps=0", "eval.prompts=null", "eval.answers=1", "rollout.max_new_tokens=2")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """500 rows to evaluate, ten of which repeat questions, beside training data that has three of them."""
    toy = Toy(tmp_path_factory.mktemp("toy"))
    rows = [{"prompt": f"say {i % 490} of 9", "ground_truth": str(i), "domain": "toy"} for i in range(ROWS)]
    (toy.path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(toy.data, "a") as train:
        train.writelines(json.dumps(row) + "\n" for row in rows[:3])
    return toy


def asked(run: Running) -> dict[str, list[int]]:
    """The tokens of the answers to each row, by its id."""
    found: dict[str, list[int]] = {}
    lines = (run.run_dir / "samples" / "eval-000000.jsonl").read_text().splitlines()
    assert len(lines) == 2 * ROWS  # one sampled and one greedy answer each
    for row in sorted(map(json.loads, lines), key=lambda row: "greedy" in row):
        found.setdefault(row["id"], []).extend(row["turns"][0]["token_ids"])
    return found


@pytest.fixture(scope="module")
def alone(toy: Toy) -> Running:
    return toy.run(*SETTINGS, f"data.train={toy.path}/bench.jsonl", ranks=1, name="alone")


def test_all_rows_of_a_file_are_evaluated_and_nothing_is_trained(alone: Running) -> None:
    (line,) = alone.metrics()
    assert line["val/num_prompts"] == len(asked(alone)) == ROWS
    assert line["val/error_share"] == 0 and 0 < line["val/score/mean"] < 1
    assert "over 500 prompts" in alone.text() and not (alone.run_dir / "checkpoints").exists()


@pytest.mark.parametrize(
    ("train", "ranks", "more"),
    [
        ("", 3, ()),  # 500 rows on three ranks are uneven
        ("data.jsonl", 3, ()),
        ("data.jsonl", 3, ("placement.mode=split", "placement.train=0")),
        ("data.jsonl", 2, ("placement.mode=overlapped",)),
    ],
    ids=str,
)
def test_neither_ranks_nor_training_data_change_what_is_evaluated(
    toy: Toy, alone: Running, train: str, ranks: int, more: tuple[str, ...]
) -> None:
    name = f"{train or 'none'}-{ranks}-{len(more)}"
    train = f"data.train={toy.path / train if train else ''}"
    run = toy.run(*SETTINGS, train, f"data.eval={toy.path}/bench.jsonl", *more, ranks=ranks, name=name)
    assert asked(run) == asked(alone)
    assert run.metrics()[0]["val/score/mean"] == pytest.approx(alone.metrics()[0]["val/score/mean"])


def test_a_run_that_trains_evaluates_all_of_them_too_and_trains_on_none(toy: Toy, alone: Running) -> None:
    settings = (*SETTINGS, "steps=1", "rollout.filter.zero_variance=false", f"data.eval={toy.path}/bench.jsonl")
    run = toy.run(*settings, "rollout.prompts_per_step=40", "rollout.over_sample=0", ranks=2, name="trains")
    assert asked(run) == asked(alone)
    assert [line["val/num_prompts"] for line in run.metrics()] == [ROWS, ROWS]
    assert len({row["id"] for row in run.samples(1)}) == 40  # an epoch, and none of the three
    assert not {row["id"] for row in run.samples(1)} & asked(run).keys()

    checkpoint = run.run_dir / "checkpoints" / "step-000001"
    bench = (*SETTINGS, "data.train=", f"data.eval={toy.path}/bench.jsonl")
    again = toy.run(*bench, f"checkpoint.resume={checkpoint}", ranks=1, name="of-checkpoint")
    assert again.metrics()[0]["val/score/mean"] == pytest.approx(run.metrics()[1]["val/score/mean"])
    before = (run.run_dir / "metrics.jsonl").read_bytes()
    refused = toy.start(*bench, ranks=1, name="trains")
    assert refused.wait() == 2 and f"checkpoint.resume={checkpoint} evaluates it there" in refused.text()
    assert (run.run_dir / "metrics.jsonl").read_bytes() == before
