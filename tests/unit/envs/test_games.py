"""Games for two: rules, opponents, ends; and the guessing games."""

import random
from collections import Counter

import pytest

from envs.games import GameEnv
from envs.guess_number import GuessNumberEnv
from envs.guess_word import WORDS, GuessWordEnv, mark
from envs.nim import NimEnv
from envs.tictactoe import TicTacToeEnv


def play(env: GameEnv, seed: int, choose) -> tuple[float, dict[str, float]]:
    """Play a game to its end. `choose` gets the observation and the legal moves."""
    text, _ = env.reset(seed)
    while True:
        text, reward, terminated, truncated, info = env.step(choose(text, text.rpartition("moves: ")[2].split(", ")))
        assert not truncated and info["metrics"]["action_is_valid"] == 1.0
        if terminated:
            return reward, info["metrics"]


def random_player(seed: int):
    rng = random.Random(seed)
    return lambda text, moves: rng.choice(moves)


def perfect_at_nim(text: str, moves: list[str]) -> str:
    """Plays by the nim-sum, read from the piles that are shown."""
    piles = [int(line.split()[2]) for line in text.splitlines() if line.startswith("pile")]
    total = 0
    for pile in piles:
        total ^= pile
    for i, pile in enumerate(piles):
        if pile ^ total < pile:
            return f"{i + 1} {pile - (pile ^ total)}"
    return moves[0]


def test_a_perfect_opponent_never_loses_at_tic_tac_toe_and_a_random_one_does() -> None:
    perfect, weak = TicTacToeEnv(skill=1.0), TicTacToeEnv(skill=0.0)
    assert {play(perfect, seed, random_player(seed))[0] for seed in range(60)} == {0.0, -1.0}
    results = Counter(play(weak, seed, random_player(seed))[0] for seed in range(60))
    assert set(results) == {1.0, 0.0, -1.0}


def test_what_the_search_says_of_tic_tac_toe() -> None:
    env = TicTacToeEnv()
    assert len(env.best_moves(("." * 9, "X"))) == 9  # a draw, whatever the first move
    assert env.best_moves(("XX.OO....", "X")) == ["3"]
    assert env.best_moves(("X...O...X", "O")) == ["2", "4", "6", "8"]  # a corner would lose
    assert env.moves(("OOO.XX...", "X")) == [] and env.outcome(("OOO.XX...", "X")) == -1
    assert env.moves(("XOXXOOOXX", "O")) == [] and env.outcome(("XOXXOOOXX", "O")) == 0


def test_nim_can_always_be_won_and_needs_the_right_moves() -> None:
    env = NimEnv(piles=3, stones=5, skill=1.0)
    for seed in range(60):
        assert play(env, seed, perfect_at_nim) == (
            1.0,
            {"success": 1.0, "draw": 0.0, "loss": 0.0, "action_is_valid": 1.0, "action_is_effective": 1.0},
        )
    assert sum(play(env, seed, random_player(seed))[0] for seed in range(60)) < -30


def test_the_nim_sum_agrees_with_a_search_to_the_end() -> None:
    env = NimEnv()
    for position in [(1, 2, 3), (1, 2, 4), (5, 5, 1), (3, 0, 2), (0, 0, 4)]:
        searched = GameEnv.best_moves(env, position)
        assert env.best_moves(position) == searched


def test_an_illegal_move_changes_nothing() -> None:
    env = NimEnv()
    first, info = env.reset(4)
    assert "two numbers" in info["instruction"] and info["board"] in first
    board = first.partition("pile 1")[2]
    for action in ("", "9 9", "1", "take 1 from 2", "1 0"):
        text, reward, terminated, _, after = env.step(action)
        assert text.startswith("That is not a legal move.") and text.endswith(board)
        assert (reward, terminated, after["state_key"]) == (0.0, False, info["state_key"])
        assert after["metrics"]["action_is_valid"] == 0.0


def test_games_repeat_by_their_seed() -> None:
    for make in (TicTacToeEnv, NimEnv):
        one, two = make(), make()
        assert [one.reset(seed) for seed in range(20)] == [two.reset(seed) for seed in range(20)]
        one.reset(3), two.reset(3)
        move = one.reset(3)[0].rpartition("moves: ")[2].split(", ")[0]
        two.reset(3)
        assert one.step(move) == two.step(f" {move} ")
    assert {TicTacToeEnv().reset(seed)[0].startswith("The opponent") for seed in range(20)} == {True, False}
    with pytest.raises(ValueError, match="skill=2: a probability"):
        TicTacToeEnv(skill=2)


def test_halving_finds_the_number_and_counting_does_not() -> None:
    env = GuessNumberEnv(largest=100)
    for seed in range(50):
        text, _ = env.reset(seed)
        low, high, reward, ended = 1, 100, 0.0, False
        while not ended:
            guess = (low + high) // 2
            text, reward, ended, _, info = env.step(str(guess))
            low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
        assert reward == 1.0 and info["metrics"]["success"] == 1.0
    env.reset(1)
    outcomes = [env.step(str(n)) for n in range(1, 8)]
    assert outcomes[-1][2] and outcomes[-1][1] == 0.0 and "It was" in outcomes[-1][0]


@pytest.mark.parametrize("action", ["", "0", "101", "50.0", "-3", "fifty", "9" * 5000])
def test_what_is_no_number_costs_no_guess(action: str) -> None:
    env = GuessNumberEnv()
    _, info = env.reset(0)
    text, reward, ended, _, after = env.step(action)
    assert (text, reward, ended) == ("A guess is a number from 1 to 100.", 0.0, False)
    assert after["state_key"] == info["state_key"] and after["metrics"]["action_is_valid"] == 0.0


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("eerie", "elbow", "G----"),
        ("allow", "llama", "YGY--"),
        ("sassy", "stops", "G-Y--"),
        ("abcde", "vwxyz", "-----"),
    ],
)
def test_marks(guess: str, secret: str, marks: str) -> None:
    assert mark(guess, secret) == marks


def test_words() -> None:
    assert len(WORDS) == len(set(WORDS)) > 250 and all(len(w) == 5 and w.isalpha() and w.islower() for w in WORDS)
    env = GuessWordEnv(guesses=3)
    for seed in range(30):
        env.reset(seed)
        left = list(WORDS)
        for _ in range(3):
            text, reward, ended, _, info = env.step(left[0].upper())
            if ended:
                break
            left = [word for word in left if mark(left[0], word) == text.split()[1]]
        assert ended and reward == info["metrics"]["success"] == float("Right!" in text)
    env.reset(0)
    assert env.step("four")[0] == "A guess is five letters." and env.step("")[4]["metrics"]["action_is_valid"] == 0.0
    assert env.step("zzzzz")[4]["metrics"]["action_is_effective"] == 1.0
    assert env.step("zzzzz")[4]["metrics"]["action_is_effective"] == 0.0
