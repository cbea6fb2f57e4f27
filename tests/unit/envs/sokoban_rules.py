"""Sokoban a second time, with sets of (row, column): the rules, the rewards, and breadth-first search over steps."""

WAYS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
LETTERS = "#_O\N{SQUARE ROOT}XPS"


class Room:
    """A board in ROLL's letters that can be played."""

    def __init__(self, board, letters=LETTERS):
        self.letters = letters
        rows = board.split("\n")
        at = {(r, c): letters.index(letter) for r, row in enumerate(rows) for c, letter in enumerate(row)}
        self.walls = {cell for cell, kind in at.items() if kind == 0}
        self.targets = frozenset(cell for cell, kind in at.items() if kind in (2, 3, 6))
        self.boxes = frozenset(cell for cell, kind in at.items() if kind in (3, 4))
        nobody = str.maketrans(letters[3:], letters[2] + letters[1] * 2 + letters[2])
        self.empty = [row.translate(nobody) for row in rows]
        (self.player,) = (cell for cell, kind in at.items() if kind in (5, 6))

    def after(self, player, boxes, word):
        """The player and the boxes after a step."""
        dr, dc = WAYS[word]
        to, beyond = (player[0] + dr, player[1] + dc), (player[0] + 2 * dr, player[1] + 2 * dc)
        if to in self.walls or (to in boxes and (beyond in self.walls or beyond in boxes)):
            return player, boxes
        return to, boxes - {to} | {beyond} if to in boxes else boxes

    def step(self, word):
        """Play a word, None for no-op: (board, reward, solved)."""
        on_target = len(self.boxes & self.targets)
        if word is not None:
            self.player, self.boxes = self.after(self.player, self.boxes, word)
        change = len(self.boxes & self.targets) - on_target
        solved = self.boxes == self.targets
        reward = -0.1 + (1 if change > 0 else -1 if change < 0 else 0) + (10 if solved else 0)
        return self.board(), reward, solved

    def board(self):
        """The letters of the present state."""
        rows = [list(row) for row in self.empty]
        for (r, c), kinds in [*((box, (3, 4)) for box in self.boxes), (self.player, (6, 5))]:
            rows[r][c] = self.letters[kinds[(r, c) not in self.targets]]
        return "\n".join(map("".join, rows))

    def search(self, pushes=False):
        """The least number of steps, or of pushes, that solves it from here; None if nothing does."""
        layer, seen, count = {(self.player, self.boxes)}, set(), 0
        while layer:
            todo, following = list(layer), set()
            seen |= layer
            for player, boxes in todo:
                if boxes == self.targets:
                    return count
                for word in WAYS:
                    state = self.after(player, boxes, word)
                    if state not in seen:
                        if pushes and state[1] == boxes:  # a walk costs nothing
                            seen.add(state)
                            todo.append(state)
                        else:
                            following.add(state)
            layer, count = following - seen, count + 1
        return None
