"""FrozenLake: transitions against Gymnasium's, boards that can be won, and an oracle that is exact."""

import random
from collections import Counter, defaultdict
from functools import cache

import pytest

from envs.frozen_lake import FrozenLake

STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # Left, Down, Right, Up
ROOT = "\N{SQUARE ROOT}"


def cells(board):
    """The board as a mapping (row, column) -> letter."""
    return {(r, c): letter for r, row in enumerate(board.split("\n")) for c, letter in enumerate(row)}


def player(board):
    return next(at for at, letter in cells(board).items() if letter in "PX" + ROOT)


def rule(board, success_rate):
    """(cell, action) -> {next cell: probability}, written from Gymnasium's documentation."""
    side = max(cells(board))[0]

    def to(cell, action):
        return tuple(min(max(at + by, 0), side) for at, by in zip(cell, STEPS[action], strict=True))

    def transitions(cell, action):
        found = Counter()
        for way in range(4):
            opposite = (way + 2) % 4 == action
            found[to(cell, way)] += success_rate if way == action else 0.0 if opposite else (1 - success_rate) / 2
        return found

    return transitions


def gymnasium_rule(board, success_rate):
    """The same from the table of Gymnasium's own FrozenLake, whose rewards and ends are those of the letters."""
    gymnasium = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake", reason="gymnasium is not installed")
    letters = {"P": "S", "_": "F", "O": "H", "G": "G"}
    desc = ["".join(letters[letter] for letter in row) for row in board.split("\n")]
    table = gymnasium.FrozenLakeEnv(desc=desc, is_slippery=True, success_rate=success_rate).P
    side, at = len(desc), cells(board)

    def transitions(cell, action):
        found = Counter()
        for probability, state, reward, terminated in table[cell[0] * side + cell[1]][action]:
            letter = at[divmod(state, side)]
            assert (reward, terminated) == (float(letter == "G"), letter in "GO")
            found[divmod(state, side)] += probability
        return found

    return transitions


@pytest.mark.parametrize("success_rate", [1 / 3, 0.8])
@pytest.mark.parametrize("make_rule", [rule, gymnasium_rule])
def test_transition_frequencies_are_gymnasiums(make_rule, success_rate):
    env, chooser = FrozenLake(size=3, p=0.9, success_rate=success_rate), random.Random(0)
    counts = defaultdict(Counter)  # by the distribution of the step relative to where it began
    for seed in range(400):
        board = env.reset(seed)[0]
        transitions, at, letters = make_rule(board, success_rate), player(board), cells(board)
        for _ in range(30):
            action = chooser.randrange(4)
            expected = {(r - at[0], c - at[1]): p for (r, c), p in transitions(at, action).items() if p}
            board, reward, terminated, _, _ = env.step(str(action))
            to = player(board)
            assert (reward, terminated) == (float(letters[to] == "G"), letters[to] in "GO")
            counts[tuple(sorted(expected.items()))][to[0] - at[0], to[1] - at[1]] += 1
            at = to
            if terminated:
                break
    assert sum(counter.total() for counter in counts.values()) > 1800
    for expected, counter in counts.items():
        assert counter.keys() <= dict(expected).keys(), "a step went where none may go"
        for way, probability in expected:
            sigma = (counter.total() * probability * (1 - probability)) ** 0.5
            assert abs(counter[way] - counter.total() * probability) <= 4.5 * sigma + 1e-9


def shortest(board):
    """The length of the shortest way to the goal, from the letters alone."""
    letters, frontier, steps = cells(board), {player(board)}, 0
    seen = set(frontier)
    while frontier and not any(letters[at] == "G" for at in frontier):
        around = {(r + dr, c + dc) for r, c in frontier for dr, dc in STEPS}
        frontier = {at for at in around - seen if letters.get(at, "O") != "O"}
        seen |= frontier
        steps += 1
    return steps if frontier else None


@pytest.mark.parametrize("settings", [{}, {"size": 6, "p": 0.6}, {"min_path": 4}, {"size": 2, "p": 0.3}])
def test_every_board_can_be_won_and_the_solution_is_a_shortest_way(settings):
    env = FrozenLake(is_slippery=False, **settings)
    for seed in range(200):
        board, _ = env.reset(seed)
        plan = env.solution()
        assert len(plan) == shortest(board) >= settings.get("min_path", 1)
        for left in range(len(plan), 0, -1):
            assert len(env.solution()) == left
            board, reward, terminated, _, info = env.step(plan[-left])
            assert info["metrics"]["action_is_effective"] == 1
        assert (reward, terminated, info["metrics"]["success"]) == (1.0, True, 1.0) and ROOT in board
        assert env.solution() == [] and env.demonstrate(seed) == plan


def test_boards_are_of_ice_with_the_given_probability():
    env = FrozenLake(size=8, p=0.7)
    letters = Counter("".join(env.reset(seed)[0] for seed in range(300)))
    share = letters["O"] / (letters["O"] + letters["_"])
    assert 0.26 < share < 0.3  # boards with too many holes are drawn again
    assert letters["P"] == letters["G"] == 300


def test_a_hole_ends_the_episode_without_reward():
    env = FrozenLake(is_slippery=False)
    for seed in range(100):
        board, _ = env.reset(seed)
        row, column = player(board)
        for action, (dr, dc) in enumerate(STEPS):
            if cells(board).get((row + dr, column + dc)) == "O":
                after, reward, terminated, truncated, info = env.step(str(action))
                assert (reward, terminated, truncated) == (0.0, True, False) and "X" in after
                assert info["metrics"]["success"] == 0 and env.solution() is None and env.best_return() == 0
                return
    raise AssertionError("no board with a hole beside the player")


def expectations(board, success_rate, steps):
    """The greatest probability of the goal in 0, 1, ... `steps` steps, by trying all that can be done."""
    transitions, letters = cache(rule(board, success_rate)), cells(board)

    @cache
    def best(cell, left):
        if letters[cell] in "GO" or not left:
            return float(letters[cell] == "G")
        return max(sum(p * best(to, left - 1) for to, p in transitions(cell, a).items()) for a in range(4))

    return [best(player(board), left) for left in range(steps + 1)]  # in this order the recursion stays flat


@pytest.mark.parametrize("success_rate", [1 / 3, 0.8])
def test_the_best_return_on_slippery_ice_is_that_of_trying_everything(success_rate):
    limited = {n: FrozenLake(success_rate=success_rate, max_steps=n) for n in (1, 5, 20)}
    unlimited, exact = FrozenLake(success_rate=success_rate), 0
    for seed in range(4):
        board, _ = unlimited.reset(seed)
        values = expectations(board, success_rate, 150)
        for n, env in limited.items():
            env.reset(seed)
            assert env.best_return() == pytest.approx(values[n], abs=1e-7)
        assert values[-1] - 1e-7 <= unlimited.best_return() <= 1.0
        if values[-1] - values[-2] < 1e-9:
            exact += unlimited.best_return() == pytest.approx(values[-1], abs=1e-6)
    assert exact


@pytest.mark.parametrize("settings", [{"max_steps": 12}, {"max_steps": 12, "success_rate": 0.8}, {"size": 3}])
def test_the_oracle_reaches_its_bound_on_slippery_ice(settings):
    env, seeds = FrozenLake(**settings), range(150)
    bound, won = env.upper_bound(seeds), 0
    for seed in seeds:
        env.demonstrate(seed)
        won += env.solution() == []
    assert abs(won / len(seeds) - bound) < 4 * (bound * (1 - bound) / len(seeds)) ** 0.5 + 1e-9
    assert 0.3 < bound <= 1


def test_without_slipping_the_bound_is_what_can_be_reached_in_time():
    env = FrozenLake(is_slippery=False, max_steps=2)
    boards = [env.reset(seed)[0] for seed in range(50)]
    assert env.upper_bound(range(50)) == sum(shortest(board) <= 2 for board in boards) / 50
    assert FrozenLake(is_slippery=False).upper_bound(range(50)) == 1.0
    for seed in range(50):
        env.reset(seed)
        assert (env.solution() is None) == (env.best_return() == 0)


def test_observations_show_one_state_in_three_ways():
    shown = {}
    for observation in ("grid", "spaced", "coordinates"):
        shown[observation], info = FrozenLake(observation=observation).reset(4)
        assert info["board"] == shown["grid"]
    assert shown["spaced"].replace(" ", "") == shown["grid"] and "P _" in shown["spaced"] + " P _"
    places = {"player": "P", "goal": "G", "holes": "O"}
    for line in shown["coordinates"].split("\n"):
        name, _, where = line.partition(": ")
        expected = [str(at) for at, letter in cells(shown["grid"]).items() if letter == places[name]]
        assert where == (" ".join(expected) or "none")


@pytest.mark.parametrize(
    "settings",
    [{"size": 1}, {"p": 1.5}, {"success_rate": -1}, {"max_steps": 0}, {"observation": "x"}, {"min_path": 20}],
)
def test_impossible_settings_are_refused_at_once(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        FrozenLake(**settings)
