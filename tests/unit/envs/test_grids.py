"""The grid worlds as plug-ins: their five-tuple, their `info`, their seeds, and nothing that they share."""

import json
import os
import random
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from envs.frozen_lake import FrozenLake
from envs.sokoban import LargerSokoban, Sokoban, SokobanDifferentGridVocab

ROOT = Path(__file__).resolve().parents[3]
CASES = {
    "lake": lambda: FrozenLake(is_slippery=False, max_steps=12),
    "slippery": lambda: FrozenLake(success_rate=0.8, observation="coordinates"),
    "simple": lambda: Sokoban(max_steps=12),
    "larger": lambda: LargerSokoban(observation="spaced"),
    "letters": lambda: SokobanDifferentGridVocab(observation="coordinates"),
}
WORDS = ("Left", "down", "R", "u", "1", "3", "", "jump", "Left Left", "0.")


def play(env, seed, steps=20):
    """Play random actions, valid or not; return all that the environment said."""
    chooser = random.Random(seed)
    said = [env.reset(seed)]
    for _ in range(steps):
        said.append(env.step(chooser.choice(WORDS)))
        if said[-1][2] or said[-1][3]:
            break
    return said


@pytest.mark.parametrize("case", CASES)
def test_what_an_environment_says_keeps_the_contract(case):
    env = CASES[case]()
    for seed in range(20):
        (observation, info), *steps = play(env, seed)
        assert isinstance(observation, str) and info["instruction"] and info["state_key"] == info["board"]
        assert json.loads(json.dumps(info)) == info
        for observation, reward, terminated, truncated, info in steps:
            assert isinstance(observation, str) and type(reward) is float
            assert type(terminated) is bool and type(truncated) is bool and not (terminated and truncated)
            assert json.loads(json.dumps(info)) == info
            assert {"success", "action_is_valid", "action_is_effective", "num_actions"} <= info["metrics"].keys()
            assert info["metrics_agg_mode"].keys() == info["metrics"].keys()
            assert set(info["metrics_agg_mode"].values()) <= {"mean", "last", "sum", "max"}
            assert info["metrics_agg_mode"]["success"] == "last" and info["metrics_agg_mode"]["num_actions"] == "sum"
    env.close()
    env.close()


@pytest.mark.parametrize("case", CASES)
def test_an_episode_depends_on_its_seed_alone(case):
    env, other = CASES[case](), CASES[case]()
    alone = {seed: play(env, seed) for seed in range(10)}
    state = random.getstate()
    for seed in reversed(range(10)):
        play(other, seed + 100, steps=3)
        assert play(other, seed) == alone[seed]
    assert random.getstate() == state, "the global generator was used"
    assert len({said[0][0] for said in alone.values()}) > 5, "seeds have worlds of their own"

    one, two = CASES[case](), CASES[case]()  # step by step in turns
    assert one.reset(1) == two.reset(1) == alone[1][0]
    chooser = random.Random(1)
    for said in alone[1][1:]:
        word = chooser.choice(WORDS)
        assert one.step(word) == two.step(word) == said


def digest():
    """A hash of what random episodes of each case say."""
    said = [play(make(), seed) for make in CASES.values() for seed in (0, 7, 2**64 - 1)]
    return sha256(repr(said).encode()).hexdigest()


def test_another_process_has_the_same_worlds():
    code = "from tests.unit.envs.test_grids import digest; print(digest())"
    env = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest()


@pytest.mark.parametrize("case", CASES)
def test_a_step_after_the_end_or_before_the_beginning_is_an_error(case):
    env = CASES[case]()
    with pytest.raises(RuntimeError):
        env.step("Left")
    env.demonstrate(3)
    with pytest.raises(RuntimeError):
        env.step("Left")
    env.reset(3)
    env.step("Left")


@pytest.mark.parametrize(
    ("env", "numbers"),
    [
        (FrozenLake(is_slippery=False), {"Left": 0, "Down": 1, "Right": 2, "Up": 3}),
        (Sokoban(), {"Up": 1, "Down": 2, "Left": 3, "Right": 4}),
    ],
)
def test_every_spelling_of_an_action_does_the_same(env, numbers):
    for word, number in numbers.items():
        said = []
        for spelling in (word, word.lower(), word.upper(), word[0], word[0].lower(), str(number), f" {word} \n"):
            env.reset(5)
            said.append(env.step(spelling))
        assert all(one == said[0] for one in said) and said[0][4]["metrics"]["action_is_valid"] == 1


@pytest.mark.parametrize("env", [FrozenLake(), Sokoban()])
@pytest.mark.parametrize(
    "action", ["", " ", "5", "-1", "\N{ARABIC-INDIC DIGIT THREE}", "Up Up", "Up.", "no-op", "None"]
)
def test_an_invalid_action_moves_nothing_and_costs_a_step(env, action):
    observation, _ = env.reset(2)
    after, reward, terminated, truncated, info = env.step(action)
    assert after == observation and not terminated and not truncated
    assert reward == (-0.1 if isinstance(env, Sokoban) else 0.0)
    assert info["metrics"] == {"action_is_valid": 0, "action_is_effective": 0, "num_actions": 1, "success": 0}


@pytest.mark.parametrize("make", [lambda n: FrozenLake(max_steps=n), lambda n: Sokoban(max_steps=n)])
def test_max_steps_truncates_and_counts_invalid_actions(make):
    env = make(3)
    env.reset(2)
    ends = [env.step("?")[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    assert env.solution() is None and env.best_return() == 0.0


def test_a_relative_observation_tells_places_as_seen_from_the_player() -> None:
    lake = FrozenLake(is_slippery=False, observation="relative")
    for seed in range(30):
        observation, info = lake.reset(seed)
        rows = info["board"].split("\n")
        at = {letter: (r, c) for r, row in enumerate(rows) for c, letter in enumerate(row)}
        down, right = (goal - player for goal, player in zip(at["G"], at["P"], strict=True))
        steps = {"Up": -down, "Down": down, "Left": -right, "Right": right}
        goal, holes = observation.split("\n")
        assert goal == "goal: " + ", ".join(f"{side} {n}" for side, n in steps.items() if n > 0)
        beside = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
        near = [(side, at["P"][0] + r, at["P"][1] + c) for side, (r, c) in beside.items()]
        dangerous = [side for side, r, c in near if 0 <= r < 4 and 0 <= c < 4 and rows[r][c] == "O"]
        assert holes == f"holes: {'; '.join(dangerous) or 'none'}"
