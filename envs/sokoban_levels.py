"""Levels of Sokoban: read from a file, or generated as solvable by playing backwards from the solution.

A set of cells is an int, a mask with bit row * width + column; walls all around keep a shifted cell from the next row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

LAYER = 64
"""Number of states that are followed at each number of pulls, which bounds the time for a large room."""
TRIALS, MAX_ROOMS = 100, 10_000
"""Number of rooms within which settings must give a level: fewer when they are checked, so that a reset never fails."""


@dataclass(frozen=True, slots=True)
class Level:
    """A room and its initial state."""

    height: int
    width: int
    floor: int
    """Mask of all cells that are no wall."""
    targets: int
    boxes: int
    player: int
    """Mask of the player's cell."""


def shift(mask: int, by: int) -> int:
    """Move all cells of a mask by a number of cells: 1 to the right, `width` down."""
    return mask << by if by > 0 else mask >> -by


def cells(mask: int) -> Iterator[int]:
    """Yield the cells of a mask, each as a separate mask."""
    while mask:
        cell = mask & -mask
        yield cell
        mask ^= cell


def spread(mask: int, width: int) -> int:
    """Return the neighbours of the cells of a mask."""
    return mask << 1 | mask >> 1 | mask << width | mask >> width


def reach(start: int, free: int, width: int) -> int:
    """Return all cells reachable from `start` over free ones, `start` included."""
    region, grown = 0, start
    while grown != region:
        region = grown
        grown = region | spread(region, width) & free
    return region


@cache
def read_levels(path: str) -> tuple[Level, ...]:
    """Read the levels of a file: `#` wall, `@` player, `$` box, `.` target, `+` and `*` player and box on a target.

    As in Boxoban's files, any other line, such as an empty one or `; 7`, separates levels. ValueError for an invalid
    level. OSError for a missing file.
    """
    blocks: list[list[str]] = [[]]
    for line in [*Path(path).read_text(encoding="utf-8").splitlines(), ""]:
        if "#" in line and set(line) <= set("# @$.+*"):
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    levels = [parse_level(rows, f"{path}: level {number}") for number, rows in enumerate(blocks[:-1])]
    if not levels:
        raise ValueError(f"{path}: has no levels")
    return tuple(levels)


def parse_level(rows: list[str], name: str = "level") -> Level:
    """Parse a level's rows. ValueError, which begins with its name, for an unplayable level."""
    height, width = len(rows), max(map(len, rows))
    letters = "".join(row.ljust(width) for row in rows)

    def mask(kinds: str) -> int:
        return sum(1 << at for at, letter in enumerate(letters) if letter in kinds)

    targets, boxes, player = mask(".+*"), mask("$*"), mask("@+")
    inside = sum(1 << row * width + column for row in range(1, height - 1) for column in range(1, width - 1))
    floor = reach(player, mask(" @$.+*"), width)
    if player.bit_count() != 1:
        raise ValueError(f"{name}: {player.bit_count()} players")
    if floor & ~inside:
        raise ValueError(f"{name}: its walls do not enclose the player")
    targets, boxes = targets & floor, boxes & floor
    if boxes.bit_count() != targets.bit_count():
        raise ValueError(f"{name}: {boxes.bit_count()} boxes and {targets.bit_count()} targets")
    if boxes == targets:
        raise ValueError(f"{name}: nothing to push, every box is on a target")
    return Level(height, width, floor, targets, boxes, player)


@dataclass(frozen=True, slots=True)
class LevelMaker:
    """A generator of levels that take `min_pushes` to `search_depth` pushes."""

    height: int = 6
    width: int = 6
    num_boxes: int = 1
    min_pushes: int = 1
    search_depth: int = 30
    """Largest number of pulls that are played backwards from the solution."""
    walk: int = 20
    """Number of steps of the walk that carves the room: more make it wider."""
    turn: float = 0.35
    """Probability that the walk changes its direction before a step: less makes longer corridors."""

    def __post_init__(self) -> None:
        shaped = min(self.height, self.width) >= 3 and self.walk >= 1 and 0 <= self.turn <= 1
        if not shaped or self.num_boxes < 1 or not 1 <= self.min_pushes <= self.search_depth:
            raise ValueError(
                f"size={self.height, self.width} num_boxes={self.num_boxes} walk={self.walk} turn={self.turn} "
                f"min_pushes={self.min_pushes} search_depth={self.search_depth}: a size of at least 3, a probability, "
                "numbers from 1, and min_pushes up to search_depth"
            )

    def make(self, random: Random, rooms: int = MAX_ROOMS) -> Level:
        """Return a level. ValueError if none of `rooms` rooms has one."""
        for _ in range(rooms):
            floor = self._carve(random)
            if floor.bit_count() < 2 * self.num_boxes + 1:
                continue
            targets = sum(random.sample(list(cells(floor)), self.num_boxes))
            if starts := [start for start in self._play_backwards(floor, targets, random) if start]:
                boxes, region = random.choice(random.choice(starts))
                player = random.choice(list(cells(region)))
                return Level(self.height, self.width, floor, targets, boxes, player)
        raise ValueError(f"none of {rooms} rooms gave a level for {self}")

    def _carve(self, random: Random) -> int:
        """Return the floor of a room: the cells of a random walk, and two neighbours of each."""
        row, column = random.randrange(1, self.height - 1), random.randrange(1, self.width - 1)
        ways = ((-1, 0), (1, 0), (0, -1), (0, 1))
        way, floor = random.choice(ways), 0
        for _ in range(self.walk):
            if random.random() < self.turn:
                way = random.choice(ways)
            row, column = self._inside(row + way[0], column + way[1])
            for down, right in ((0, 0), *random.sample(ways, 2)):
                at_row, at_column = self._inside(row + down, column + right)
                floor |= 1 << at_row * self.width + at_column
        return floor

    def _inside(self, row: int, column: int) -> tuple[int, int]:
        return min(max(row, 1), self.height - 2), min(max(column, 1), self.width - 2)

    def _play_backwards(self, floor: int, targets: int, random: Random) -> Iterator[list[tuple[int, int]]]:
        """Yield for each number of pulls from the solution the starts (boxes, the player's region) without a box on a
        target.
        """
        width = self.width
        layer, free = {}, floor & ~targets
        while free:
            region = reach(free & -free, free, width)
            layer[targets, region] = None
            free &= ~region
        # Dicts instead of sets keep insertion order, so that a seed gives the same level in every process.
        seen = dict(layer)
        for pulls in range(1, self.search_depth + 1):
            found: dict[tuple[int, int], None] = {}
            for boxes, region in layer:
                for by in (-width, width, -1, 1):
                    for box in cells(boxes & shift(region, -by) & shift(region, -2 * by)):
                        there = shift(box, by)
                        pulled = boxes ^ box ^ there
                        state = pulled, reach(shift(there, by), floor & ~pulled, width)
                        if state not in seen:
                            seen[state] = found[state] = None
            if not found:
                return
            layer = found if len(found) <= LAYER else dict.fromkeys(random.sample(list(found), LAYER))
            if pulls >= self.min_pushes:
                yield [state for state in layer if not state[0] & targets]
