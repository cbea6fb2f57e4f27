"""Datasets of the hub, over a stand-in for the package `datasets`."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import DataConfig
from spmd_rl.data import Prompts


class NotFound(FileNotFoundError):
    """As the package's own."""


@pytest.fixture
def load_dataset(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls of `load_dataset`, which gives the rows of `rows` or raises them."""

    def load(repo: str, config: str | None, *, split: str, revision: str | None) -> Any:
        fake.calls.append((repo, config, split, revision))
        if isinstance(fake.rows, Exception):
            raise fake.rows
        return [{**row, "question": f"{split} {row['question']}"} for row in fake.rows]

    fake = SimpleNamespace(
        calls=[], rows=[{"question": str(i), "answer": "a\n#### 5", "level": None} for i in range(3)]
    )
    errors = SimpleNamespace(DatasetNotFoundError=NotFound, DatasetsError=NotFound)
    package = SimpleNamespace(load_dataset=load, exceptions=errors, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", package)
    return fake


def test_each_part_of_the_name_arrives(load_dataset) -> None:
    prompts = Prompts.load(DataConfig(train="openai/gsm8k:main", eval="hf:a/b@v1:test[:9]"))
    assert load_dataset.calls == [("openai/gsm8k", "main", "train", None), ("a/b", None, "test[:9]", "v1")]
    assert [p.ground_truth for p in prompts.train] == ["5"] * 3
    assert dict(prompts.train[0].extra) == {"answer": "a\n#### 5"}


def test_what_is_evaluated_is_the_test_split(load_dataset) -> None:
    Prompts.load(DataConfig(train="a/b", eval="a/b"))
    assert [split for _, _, split, _ in load_dataset.calls] == ["train", "test"]


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (ValueError("Unknown split 'x'.\nKnown: train"), "data.train: a/b:c:train: Unknown split 'x'. Known: train"),
        (NotFound("Dataset 'a/b' doesn't exist"), "data.train: no file a/b, and no such dataset of the hub (if it is"),
        (
            ConnectionError("offline"),
            "data.train: no file a/b, and the hub cannot give a/b:c:train (ConnectionError: off",
        ),
        (
            ValueError("Couldn't find cache for a/b"),
            "data.train: no file a/b, and the hub cannot give a/b:c:train (Val",
        ),
    ],
)
def test_what_the_package_raises_is_one_line(load_dataset, raised: Exception, line: str) -> None:
    load_dataset.rows = raised
    with pytest.raises(UserError) as caught:
        Prompts.load(DataConfig(train="a/b@v2:c"))
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
    command = """run python -c "from datasets import load_dataset; load_dataset('a/b', 'c', revision='v2')\""""
    assert str(caught.value).endswith(command) == ("cannot give" in line)


def test_without_the_package_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"^data.train: no file a/b; a dataset of the hub needs .*'spmd-rl\[data\]'$"):
        Prompts.load(DataConfig(train="a/b"))


def test_a_broken_row_is_named_by_its_index(load_dataset) -> None:
    load_dataset.rows = [{"question": "q", "label": "1"}]
    with pytest.raises(UserError, match=r"^data.train: a/b:train\[0\]: needs `ground_truth` or `answer`; it has "):
        Prompts.load(DataConfig(train="a/b"))
