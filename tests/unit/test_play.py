"""A person plays an environment on the terminal, and the policy plays it for a person who looks on."""

import io
from pathlib import Path

import pytest

from envs.frozen_lake import FrozenLake
from spmd_rl.tools import play
from tests.models import tiny

LAKE = ["env.lake.target=envs.frozen_lake:FrozenLake", "env.lake.args.is_slippery=false"]


class Echo:
    """An environment that pays for each letter of an action, and shows people something else than the policy."""

    def reset(self, seed):
        self.left = 2
        return f"say anything, {seed}", {"board": "\x1b[31mboard", "instruction": "Speak."}

    def step(self, action):
        self.left -= 1
        if action == "fail":
            raise RuntimeError("on purpose")
        info = {"metrics": {"action_is_valid": float(bool(action))}, "board": "seen"}
        return f"you said {action}", float(len(action)), False, not self.left, info


ECHO = [f"env.echo.target={__name__}:Echo", "env.echo.format_penalty=-0.5"]


def typed(monkeypatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_person_walks_to_the_goal(monkeypatch, capsys) -> None:
    world = FrozenLake(is_slippery=False)
    observation, info = world.reset(11)
    typed(monkeypatch, *world.solution())
    assert play.run([*LAKE, "seed=11"]) == 0
    out = capsys.readouterr().out
    for line in (*info["instruction"].splitlines(), *observation.splitlines(), "<answer>ACTION</answer>"):
        assert line in out
    assert out.count("reward +0") == len(world.solution()) - 1 and out.count("reward +1") == 1
    assert "terminated, return +1" in out


def test_penalties_the_board_and_the_end(monkeypatch, capsys) -> None:
    typed(monkeypatch, "", " abc ")
    assert play.run([*ECHO, "seed=5"]) == 0
    out = capsys.readouterr().out
    assert "say anything, 5" in out and "\\x1b[31mboard" in out and "\x1b" not in out
    assert "no action" in out and "reward -0.5" in out and "reward +3" in out and "truncated, return +2.5" in out
    assert "you said abc" not in out and "seen" in out  # people get the board


def test_limits_of_turns_and_a_game_that_is_left(monkeypatch, capsys) -> None:
    typed(monkeypatch, "a")
    assert play.run([*ECHO, "rollout.max_turns=1"]) == 0
    assert "action 1 of 1> " in (out := capsys.readouterr().out) and "max_turns, return +1" in out
    typed(monkeypatch, "a")
    assert play.run(ECHO) == 0
    assert "given up, return +1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        ([], 2, "env: no environment is given"),
        ([*LAKE, *ECHO], 2, "play.env: which of the environments; known: lake, echo"),
        ([*LAKE, "play.env=sea"], 2, "play.env: no environment 'sea'; known: lake"),
        ([*LAKE, "play.policy=maybe"], 2, "play.policy: must be true or false, not 'maybe'"),
        (["env.lake.target=envs.frozen_lake:Sea"], 2, "env.lake.target"),
        ([*LAKE, "rollout.max_turn=3"], 2, "rollout.max_turns"),
        (ECHO, 1, "on purpose"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, words: list[str], code: int, why: str) -> None:
    typed(monkeypatch, "fail")
    assert play.run(words) == code
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


def test_one_of_several_is_played(monkeypatch, capsys) -> None:
    typed(monkeypatch, "a", "b")
    assert play.run([*LAKE, *ECHO, "play.env=echo"]) == 0
    assert "return +2" in capsys.readouterr().out


def test_the_policy_plays(tmp_path: Path, capsys) -> None:
    limits = [
        "rollout.max_turns=2",
        "rollout.max_new_tokens=4",
        "rollout.max_prompt_tokens=400",
        "engine.kv_tokens=1024",
    ]
    model = tiny("llama", tmp_path / "model", max_position_embeddings=1024)
    words = [*LAKE, *limits, f"policy.model={model}", "policy.dtype=float32", "play.policy=true", "seed=3"]
    texts = []
    for _ in range(2):
        assert play.run(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1], "the seed says how it plays"
    observation, _ = FrozenLake(is_slippery=False).reset(3)
    assert all(line in texts[0] for line in observation.splitlines()) and "<|im_start|>assistant" in texts[0]
    assert texts[0].count("reward +0") == 2 and "max_turns, return +0" in texts[0]
