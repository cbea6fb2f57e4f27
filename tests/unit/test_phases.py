"""What a slow command says while it works, and that a quick one says nothing."""

import time

import pytest

from spmd_rl.base import waits


def own_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines of these tests: a step that another test of this process left open says that it waits, too."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("looking")]


@pytest.mark.parametrize(
    ("age", "rank", "lasts", "told"),
    [(0.0, 0, 0.9, False), (9.0, 0, 0.9, True), (9.0, 1, 0.9, False), (9.0, 0, 0.0, False)],
    ids=["a quick command", "a slow one", "another rank", "a quick phase of a slow one"],
)
def test_a_line_a_phase(monkeypatch, capsys, age: float, rank: int, lasts: float, told: bool) -> None:
    monkeypatch.setattr(waits, "BEGAN", time.monotonic() - age)
    monkeypatch.setattr(waits, "QUIET_SECONDS", 5.0)
    monkeypatch.setenv("RANK", str(rank))
    with waits.phase("looking"):
        time.sleep(lasts)
    assert own_lines(capsys) == ["looking ..."] * told


def test_a_phase_that_fails_leaves_nothing_behind(monkeypatch, capsys) -> None:
    monkeypatch.setattr(waits, "BEGAN", time.monotonic() - 9.0)
    with pytest.raises(ValueError, match="mine"), waits.phase("looking"):
        raise ValueError("mine")
    time.sleep(2 * waits.LEAST_SECONDS)
    assert own_lines(capsys) == []
