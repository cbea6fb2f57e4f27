"""Ranks that differ in one setting, package or row end before the first step, with one line that names it."""

import pytest

from tests.e2e.runs import ROOT, Toy

DOOR = ROOT / "tests" / "e2e" / "differing_rlvr.py"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("agreement"))


@pytest.mark.parametrize(
    ("differs", "line"),
    [
        ("policy.lr=3e-05", "policy.lr: ranks [1] have 3e-05, the others 0.001"),
        ("rollout.temperature=0.5", "rollout.temperature: ranks [1] have 0.5, the others 1.0"),
        ("data.seed=7", "data.seed: ranks [1] have 7, the others 0"),
        ("package torch=9.9", "package torch: ranks [1] have 9.9, the others "),
        ("row 17", "data.train: row 17 differs: ranks [1] have "),
    ],
)
def test_the_difference_is_named_before_the_first_step(toy: Toy, differs: str, line: str) -> None:
    name = differs.replace(" ", "-").replace("=", "-")
    run = toy.start(script=DOOR, name=name, env={"DIFFERS": differs})
    assert run.wait() == 2
    said = [text for text in run.text().splitlines() if text.startswith("error: ")]
    assert len(said) == 1 and said[0].startswith(f"error: {line}")
    assert not any(event["event"] == "step" for event in run.events(0))
