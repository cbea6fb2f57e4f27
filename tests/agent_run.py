"""A run of an agent, made up, as the sample log writes it: FrozenLake played by a policy that learns.

    python -m tests.agent_run DIR [MODEL]

MODEL is a directory with a `tokenizer.json`, for the texts of the tokens; without one, they are bytes.
"""

import random
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spmd_rl.learn import sample_log
from spmd_rl.track.metrics import MetricsFile
from spmd_rl.track.samples import SampleLog, SampleRow
from spmd_rl.types import AgentStep, Group, Prompt, Sample, Turn, Verdict

SIZE, HOLES, START, GOAL = 4, {5, 7, 11, 12}, 0, 15
MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
BEST = {
    0: "Down",
    1: "Left",
    2: "Down",
    3: "Left",
    4: "Down",
    6: "Down",
    8: "Right",
    9: "Down",
    10: "Down",
    13: "Right",
    14: "Right",
}
RULES = (
    "You are solving the FrozenLake puzzle. Move the player P over the frozen tiles _ to the goal G. "
    "Holes O end the game.\nAnswer with one of Left, Down, Right, Up: <answer>Right</answer>.\n\n"
)
MAX_TURNS = 10
ASK, END = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"


def bytes_tokenizer(path: Path) -> Path:
    """Write a directory with a tokenizer whose tokens are bytes."""
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(path / "tokenizer.json"))
    return path


@dataclass
class Policy:
    """Answers with the best move with probability `skill`; some answers hold no action."""

    encode: Callable[[str], list[int]]
    skill: float
    version: int
    rng: random.Random

    def turn(self, given: str, state: int) -> tuple[str | None, Turn]:
        """The action, if there is one, and the turn without its step."""
        rng = self.rng
        right = rng.random() < self.skill
        action = BEST[state] if right else rng.choice(list(MOVES))
        thought = f"I am at row {state // SIZE}, column {state % SIZE}. " + rng.choice(
            [f"{action} is free, so I go there.", "The goal is below.", "There is a hole near me.", ""]
        )
        wrong_format = rng.random() < 0.12 * (1 - self.skill)
        text = f"{thought.strip()}\n" + (action if wrong_format else f"<answer>{action}</answer>")
        ids = self.encode(text + END)
        logprobs = array("f", [-abs(rng.gauss(0, 0.25)) if rng.random() < 0.8 else -rng.expovariate(0.6) for _ in ids])
        versions = array("i", [self.version] * len(ids))
        turn = Turn(array("i", self.encode(given)), array("i", ids), logprobs, versions, "stop", text)
        return None if wrong_format else action, turn


def board(state: int) -> str:
    """The map with the player on it."""
    tiles = ["O" if i in HOLES else "G" if i == GOAL else "_" for i in range(SIZE * SIZE)]
    tiles[state] = {"O": "X", "G": "W"}.get(tiles[state], "P")
    return "\n".join(" ".join(tiles[i : i + SIZE]) for i in range(0, SIZE * SIZE, SIZE))


def play(policy: Policy, ticket: int, answer: int, greedy: bool = False) -> Sample:
    """One episode."""
    state, turns, total, stop, valid = START, [], 0.0, "max_turns", 0
    given = ASK.format(RULES + board(state))
    for _ in range(MAX_TURNS):
        action, turn = policy.turn(given, state)
        row, column = divmod(state, SIZE)
        down, across = MOVES[action] if action else (0, 0)
        moved = max(0, min(SIZE - 1, row + down)) * SIZE + max(0, min(SIZE - 1, column + across))
        reward = 1.0 if moved == GOAL else 0.0 if action else -0.05
        metrics = {"action_is_valid": float(action is not None), "action_is_effective": float(moved != state)}
        said = (
            "You cannot go on." if moved in HOLES else "You have reached the goal." if moved == GOAL else board(moved)
        )
        step = AgentStep(said, reward, 7919 * state + 104729, action, metrics, board(moved))
        turns.append(Turn(turn.prompt_ids, turn.token_ids, turn.logprobs, turn.versions, "stop", turn.text, step=step))
        state, given, total = moved, "\n" + ASK.format(board(moved)), total + reward
        valid += action is not None
        if state == GOAL or state in HOLES:
            stop = "terminated"
            break
    parts = {"success": float(state == GOAL), "action_is_valid": valid / len(turns), f"stop/{stop}": 1.0}
    return Sample(ticket, answer, tuple(turns), Verdict("ok", total, parts), greedy=greedy)


def groups(policy: Policy, tickets: range, answers: int) -> Iterator[Group]:
    """One group of episodes for each ticket."""
    for ticket in tickets:
        samples = tuple(play(policy, ticket, answer) for answer in range(answers))
        yield Group(Prompt(f"{ticket:032x}", (), "frozen_lake", "", {"seed": ticket}), ticket, samples)


def trained(group: Group, rows: list[SampleRow]) -> list[SampleRow]:
    """Give the rows of a group the advantages of GRPO, and one for each turn to those of odd tickets."""
    scores = [row.verdict["score"] for row in rows]
    mean = sum(scores) / len(scores)
    spread = (sum((score - mean) ** 2 for score in scores) / len(scores)) ** 0.5
    for row, score in zip(rows, scores, strict=True):
        row.kept, row.reject_reason = spread > 0, None if spread > 0 else "equal scores"
        row.advantage = (score - mean) / spread if spread > 0 else None
        if group.ticket % 2 and row.advantage is not None:
            for turn in row.turns:
                turn.advantage = row.advantage * (0.4 if turn.step.metrics["action_is_effective"] else -0.6)
            lengths = [len(turn.token_ids) for turn in row.turns]
            total = sum(turn.advantage * length for turn, length in zip(row.turns, lengths, strict=True))
            row.advantage = total / sum(lengths)
    return rows


def write_step(directory: Path, step: int, encode: Callable[[str], list[int]], num_steps: int) -> None:
    """Write the samples and the metrics of a step, as a run does at its end."""
    rng = random.Random(step)
    policy = Policy(encode, 0.35 + 0.6 * step / num_steps, step - 1, rng)
    made = list(groups(policy, range(8 * step, 8 * step + 8), 8))
    # held-out rows have what those of training have but the advantage
    rows = [row for group in made for row in trained(group, list(sample_log.held_out([group])))]
    for kind, logged in (("step", rows), ("eval", sample_log.held_out(groups(policy, range(16), 1)))):
        log = SampleLog(directory / "samples", 0, 1, kind)
        log.write(step, logged)
        log.merge(step)
    scores = [row.verdict["score"] for row in rows]
    values = {
        "critic/score/mean": sum(scores) / len(scores),
        "env/frozen_lake/success": sum(s > 0.5 for s in scores) / len(scores),
    }
    MetricsFile(directory / "metrics.jsonl").append(step, values)


def make_agent_run(directory: Path, model: Path | None = None, num_steps: int = 3, written: int | None = None) -> Path:
    """Write a run directory, its first `written` steps (default: all) with samples."""
    (directory / "samples").mkdir(parents=True)
    model = model or bytes_tokenizer(directory.parent / "model")
    settings = {"seed": 0, "steps": num_steps, "policy": {"model": str(model)}, "run": {"name": "frozen-lake-grpo"}}
    (directory / "config.yaml").write_text(yaml.safe_dump(settings | {"about": {"pipeline": "agentic"}}))
    for step in range(1, (num_steps if written is None else written) + 1):
        write_step(directory, step, encoder(model), num_steps)
    return directory


def encoder(model: Path) -> Callable[[str], list[int]]:
    """Text to token ids, as the model's tokenizer has it."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(make_agent_run(where, Path(sys.argv[2]).expanduser() if len(sys.argv) > 2 else None, num_steps=20))
