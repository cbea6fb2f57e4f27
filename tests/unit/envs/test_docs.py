"""The examples of docs/ENVIRONMENTS.md run as they stand there."""

import inspect
import re
from pathlib import Path

from envs.frozen_lake import FrozenLake
from envs.sokoban import Sokoban

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "ENVIRONMENTS.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_environment_of_twenty_lines_plays():
    (source,) = (example for example in EXAMPLES if "class GuessNumber" in example)
    assert len([line for line in source.splitlines() if line.strip()]) <= 20
    names = {}
    exec(source, names)
    env = names["GuessNumber"](highest=20)
    for seed in range(30):
        observation, info = env.reset(seed)
        assert observation and "1 to 20" in info["instruction"]
        assert env.step("")[4]["metrics"]["action_is_valid"] == 0
        low, high, done = 1, 20, False
        while not done:
            guess = (low + high) // 2
            observation, reward, terminated, truncated, info = env.step(str(guess))
            low, high = (guess + 1, high) if observation == "higher" else (low, guess - 1)
            done = terminated or truncated
        assert (reward, info["metrics"]["success"]) == (1.0, True)
    env.reset(0)
    assert [env.step("")[3] for _ in range(6)] == [False] * 5 + [True]


def test_the_oracles_example_solves_its_level():
    (source,) = (example for example in EXAMPLES if "env.solution()" in example)
    names = {}
    exec(source, names)
    assert names["terminated"] and names["info"]["metrics"]["success"] == 1


def test_the_tables_name_every_setting():
    for world in (FrozenLake, Sokoban):
        section = TEXT.split(f"## {world.__name__}\n")[1].split("\n## ")[0]
        named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
        assert named == {"args", *inspect.signature(world).parameters}
