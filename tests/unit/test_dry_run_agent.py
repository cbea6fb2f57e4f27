"""`--dry-run` of an agent's run: what it says of an environment, and which failures end it."""

from pathlib import Path

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.load import load
from spmd_rl.config.schema import AgenticConfig
from spmd_rl.tools.dry_run_agent import show
from tests.models import tiny

DOCS = (Path(__file__).parents[2] / "docs/ENVIRONMENTS.md").read_text()
MORE = """
import asyncio, time
class Solved(GuessNumber):
    def solution(self): return [str(self.number)]
class NoWorld(GuessNumber):
    def reset(self, seed): raise ValueError("no world")
class NoReply(GuessNumber):
    def step(self, action): return None
class Lost(GuessNumber):
    def solution(self): raise RuntimeError("lost")
class Sleeps(GuessNumber):
    def step(self, action):
        try:
            time.sleep(60)
        except Exception:
            return "slept", 0.0, False, False, {}
class Waits(GuessNumber):
    async def reset(self, seed): await asyncio.sleep(60)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dry-agent")
    tiny("llama", place / "model")
    example = DOCS.split("## Your own, in twenty lines")[1].split("```python\n")[1].split("```")[0]
    (place / "docs_env.py").write_text(example + MORE)
    return place


def previewed(place: Path, monkeypatch: pytest.MonkeyPatch, name: str, *given: str) -> None:
    monkeypatch.syspath_prepend(str(place))
    lines = [f"policy.model={place}/model", f"env.guess.target=docs_env:{name}", "env.guess.step_timeout=0.3"]
    show(load("agentic", AgenticConfig, [*lines, "env.guess.reset_timeout=0.3", f"run.dir={place}/run", *given]))
    assert not (place / "run").exists()


def test_the_docs_environment_has_no_solution_and_passes(place: Path, capsys, monkeypatch) -> None:
    previewed(place, monkeypatch, "GuessNumber", "env.guess.args.highest=100")
    text = capsys.readouterr().out
    assert text.count("Find my number from 1 to 100. I say higher or lower.\nYour guess?") == 3
    assert "[not played: the environment has no solution() to play]" in text
    assert "its solution  not tried: the environment has no solution()" in text and "no action     reward 0" in text


def test_demonstrations_that_nobody_can_show_end_it(place: Path, monkeypatch) -> None:
    with pytest.raises(UserError, match=r"^warmup.steps=2: env.guess shows nothing to learn from: .*no solution\(\)"):
        previewed(place, monkeypatch, "GuessNumber", "warmup.steps=2")
    previewed(place, monkeypatch, "Solved", "warmup.steps=2")


@pytest.mark.parametrize(("pattern", "said"), [("", "return 1, 1, 1"), ("'A: (.*)'", "not tried: its pattern is no")])
def test_a_solution_is_played_where_an_answer_can_be_written(place: Path, capsys, monkeypatch, pattern, said) -> None:
    previewed(place, monkeypatch, "Solved", *([f"env.guess.pattern={pattern}"] if pattern else []))
    assert f"its solution  {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NoWorld", r"^env.guess: seed \d+: docs_env.py:\d+: ValueError: no world \(docs_env:NoWorld\)$"),
        ("NoReply", "^env.guess.target: docs_env:NoReply: .*must return .observation, reward"),
        ("Lost", "docs_env.py:.*RuntimeError: lost"),
        ("Sleeps", "^env.guess.target: docs_env:Sleeps: not finished after 0.3 s$"),
        ("Waits", "^env.guess: seed .*not finished after 0.3 s"),
    ],
)
def test_an_environment_that_fails_ends_it(place: Path, capsys, monkeypatch, name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        previewed(place, monkeypatch, name, "env.guess.on_error=zero")
    shown = capsys.readouterr().out
    assert shown.count("\n! env.guess") == 1 and "Would be written" in shown  # after all else


def test_one_environment_that_fails_does_not_hide_the_others(place: Path, capsys, monkeypatch) -> None:
    others = ["env.good.target=docs_env:Solved", "env.eval.target=docs_env:Solved", "env.eval.share=0"]
    with pytest.raises(UserError, match="^env.guess: seed .*NoWorld"):
        previewed(place, monkeypatch, "NoWorld", *others)
    shown = capsys.readouterr().out
    assert "env.good\n" in shown and shown.count("its solution  return 1, 1, 1") == 2
    assert "eval evaluated only" in shown
