"""Sokoban: its rules against a second implementation, levels that can be solved, a solver that is exact."""

import random

import pytest

from envs.sokoban import LargerSokoban, Sokoban, SokobanDifferentGridVocab
from tests.unit.envs.sokoban_rules import LETTERS, WAYS, Room

LEVELS = """
; 0
#######
#.    #
#  $ @#
#   $.#
#######

; 1
  #####
###   #
#.* $ #
### $ #
###+  #
  #####
"""


@pytest.fixture
def levels(tmp_path):
    path = tmp_path / "levels.txt"
    path.write_text(LEVELS)
    return str(path)


@pytest.mark.parametrize(
    ("make", "episodes", "rewards"),
    [
        (Sokoban, 600, {-0.1, 10.9}),
        (LargerSokoban, 300, {-0.1, 0.9, -1.1}),
        (lambda: Sokoban((7, 7), num_boxes=3, walk=30), 100, {-0.1, 0.9, -1.1}),
    ],
)
def test_the_rules_on_random_action_sequences(make, episodes, rewards):
    env, chooser, seen = make(), random.Random(0), set()
    for seed in range(episodes):
        board, _ = env.reset(seed)
        room = Room(board)
        for _ in range(30):
            word = chooser.choice([*WAYS, *WAYS, *WAYS, None])
            before = room.player
            expected = room.step(word)
            observation, reward, terminated, truncated, info = env.step(word or "")
            assert (observation, terminated, truncated) == (expected[0], expected[2], False)
            assert reward == pytest.approx(expected[1])
            assert info["metrics"]["success"] == terminated and info["metrics"]["action_is_valid"] == (word is not None)
            assert info["metrics"]["action_is_effective"] == (room.player != before)
            seen.add(round(reward, 1))
            if terminated:
                break
    assert seen >= rewards


SHAPES = {
    "simple": lambda: Sokoban(),
    "larger": lambda: LargerSokoban(),
    "short": lambda: Sokoban(search_depth=2),
    "long": lambda: Sokoban((7, 7), min_pushes=4, search_depth=8),
    "three": lambda: Sokoban((7, 8), num_boxes=3, walk=30, turn=0.8),
}


@pytest.mark.parametrize(
    ("case", "seeds"),
    [(case, 200 if case == "simple" else 20) for case in SHAPES]
    + [pytest.param(case, 2000, marks=pytest.mark.slow) for case in SHAPES],
)
def test_every_level_can_be_solved_and_its_solution_is_played_to_the_bound(case, seeds):
    env, boards = SHAPES[case](), set()
    for seed in range(seeds):
        board, _ = env.reset(seed)
        boards.add(board)
        assert not Room(board).boxes & Room(board).targets
        bound, plan, total = env.best_return(), env.solution(), 0.0
        for left in range(len(plan), 0, -1):
            assert not (seed < 5 and len(env.solution()) != left)
            _, reward, terminated, _, info = env.step(plan[-left])
            assert terminated == (left == 1)
            total += reward
        assert info["metrics"]["success"] == 1 and env.solution() == []
        assert total == pytest.approx(bound)
    assert len(boards) > 0.7 * min(seeds, 200)


@pytest.mark.parametrize("case", ["simple", "short", "long"])
def test_solutions_are_the_shortest_and_pushes_are_within_the_settings(case):
    least, most = {"simple": (1, 30), "short": (1, 2), "long": (4, 8)}[case]
    env, found = SHAPES[case](), set()
    for seed in range(100):
        room = Room(env.reset(seed)[0])
        assert len(env.solution()) == room.search()
        found.add(room.search(pushes=True))
    assert least <= min(found) and max(found) <= most and len(found) > 1


def test_solutions_with_several_boxes_are_the_shortest():
    env = Sokoban((7, 7), num_boxes=2, search_depth=8)
    for seed in range(12):
        assert len(env.reset(seed) and env.solution()) == Room(env.reset(seed)[0]).search()


def test_after_random_play_the_oracle_knows_whether_it_can_still_be_solved():
    env, chooser, lost = Sokoban(), random.Random(1), 0
    for seed in range(100):
        room = Room(env.reset(seed)[0])
        for _ in range(chooser.randrange(60)):
            if room.boxes != room.targets:
                word = chooser.choice(list(WAYS))
                room.step(word)
                env.step(word)
        plan = env.solution()
        assert (None if plan is None else len(plan)) == room.search()
        lost += plan is None
    assert 3 < lost < 97


def test_too_few_steps_leave_no_solution_and_a_lower_bound():
    env = Sokoban(max_steps=2)
    for seed in range(50):
        steps = Room(env.reset(seed)[0]).search()
        assert (env.solution() is None) == (steps > 2)
        assert env.best_return() == pytest.approx(-0.2 if steps > 2 else 11 - 0.1 * steps)
    assert env.upper_bound(range(50)) < Sokoban().upper_bound(range(50))


def test_other_letters_show_the_same_levels():
    roll, other = Sokoban(), SokobanDifferentGridVocab()
    for seed in range(30):
        board, changed = roll.reset(seed)[0], other.reset(seed)[0]
        assert changed == board.translate(str.maketrans(LETTERS, "W.GCBA@"))
        assert Room(changed, "W.GCBA@").board() == changed


def test_the_instruction_names_each_letter_and_action():
    instruction = Sokoban().reset(0)[1]["instruction"]
    for letter, meaning in zip(
        LETTERS, ("wall", "floor", "target", "box on", "box", "player", "player on"), strict=True
    ):
        assert f"{letter} a {meaning}" in instruction or f"{letter} the {meaning}" in instruction or meaning == "floor"
    assert "Up, Down, Left, Right" in instruction


def test_observations_show_one_state_in_three_ways():
    shown = {name: LargerSokoban(observation=name).reset(4)[0] for name in ("grid", "spaced", "coordinates")}
    assert shown["spaced"].replace(" ", "") == shown["grid"] and shown["spaced"].startswith("# # #")
    room = Room(shown["grid"])
    inner = {cell for cell in room.walls if min(cell) > 0 and max(cell) < 9}
    places = {"player": {room.player}, "boxes": room.boxes, "targets": room.targets, "inner walls": inner}
    for line in shown["coordinates"].split("\n"):
        name, _, where = line.partition(": ")
        assert where == " ".join(map(str, sorted(places.pop(name))))
    assert not places


def test_levels_of_a_file_are_chosen_by_the_seed(levels):
    env = Sokoban(levels=levels)
    boards = {env.reset(seed)[0] for seed in range(20)}
    first = "#######\n#O____#\n#__X_P#\n#___XO#\n#######"
    second = "#######\n###___#\n#O\N{SQUARE ROOT}_X_#\n###_X_#\n###S__#\n#######"
    assert boards == {first, second}
    assert {Sokoban(levels=levels, first_level=1).reset(seed)[0] for seed in range(20)} == {second}
    assert {Sokoban(levels=levels, num_levels=1).reset(seed)[0] for seed in range(20)} == {first}
    for board, seed in {env.reset(seed)[0]: seed for seed in range(20)}.items():
        env.reset(seed)
        assert len(env.solution()) == Room(board).search()
        assert env.best_return() == pytest.approx(12 - 0.1 * Room(board).search())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no levels"),
        ("#####\n#@$.#\n#####\n\n####\n#@ #\n#$ #\n####", "level 1: 1 boxes and 0 targets"),
        ("#####\n#  .#\n# $ #\n#####", "level 0: 0 players"),
        ("#####\n#@$. \n#####", "do not enclose"),
        ("#####\n#@* #\n#####", "every box is on"),
    ],
)
def test_a_file_that_nobody_could_play_is_refused(tmp_path, text, told):
    path = tmp_path / "levels.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        Sokoban(levels=str(path))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"size": (3, 3)}, "none of"),
        ({"size": (6, 2)}, "size"),
        ({"size": 2}, "size"),
        ({"num_boxes": 9}, "none of"),
        ({"num_boxes": 0}, "num_boxes"),
        ({"min_pushes": 9, "search_depth": 3}, "min_pushes"),
        ({"letters": "#_OX"}, "letters"),
        ({"letters": "##_OXPS"}, "letters"),
        ({"observation": "pixels"}, "observation"),
        ({"max_steps": 0}, "max_steps"),
        ({"walk": 0}, "walk"),
        ({"turn": 2}, "turn"),
    ],
)
def test_impossible_settings_are_refused_at_once(settings, told):
    with pytest.raises(ValueError, match=told):
        Sokoban(**settings)
