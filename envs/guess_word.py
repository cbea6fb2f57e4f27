"""The opponent thinks of a word of five letters; each guess is marked letter by letter, as in Wordle.

env.word.target=envs.guess_word:GuessWordEnv env.word.args.guesses=6
"""

import random
from typing import Any

from .retrieval import phrases

WORDS = phrases(
    "about, above, actor, adult, after, again, agent, album, alive, angle, apple, arrow, aside, awake, bacon, badge, "
    "baker, beach, bench, berry, birth, black, blade, blame, bland, blend, block, board, bonus, brain, brave, bread, "
    "brick, bride, brief, bring, broom, brown, brush, build, cabin, cable, candy, canoe, cargo, chain, chair, chalk, "
    "charm, chase, cheap, cheek, chess, chief, civic, clean, clerk, cliff, clock, cloth, cloud, coach, coral, couch, "
    "cover, crane, cream, crowd, crown, cycle, daily, dance, depth, diary, dozen, draft, dream, dress, drink, eager, "
    "early, earth, elbow, empty, equal, error, event, exact, fable, faith, fault, feast, fence, ferry, field, flame, "
    "fleet, float, flour, focus, forge, fresh, fruit, funny, giant, glass, globe, grain, grape, green, group, guide, "
    "habit, happy, heart, honey, horse, hotel, house, human, humor, ideal, image, index, ivory, jewel, judge, juice, "
    "knife, label, large, laugh, layer, learn, lemon, level, light, limit, local, lucky, lunch, magic, major, maple, "
    "march, match, metal, model, money, month, motor, mount, mouse, mouth, music, nerve, never, noble, north, novel, "
    "nurse, ocean, offer, olive, onion, opera, orbit, organ, other, owner, paint, panel, paper, party, peace, pearl, "
    "phone, piano, pilot, pitch, plain, plane, plant, plate, point, pound, power, press, price, pride, prize, proud, "
    "queen, quick, quiet, radio, rapid, ratio, reach, ready, rider, ridge, river, robin, rough, round, royal, salad, "
    "scale, scene, scout, serve, shade, shape, sharp, sheep, shelf, shine, shirt, shore, short, skirt, sleep, "
    "slice, small, smile, smoke, snake, solid, sound, south, space, spare, spoon, sport, staff, stage, stair, stamp, "
    "stand, steam, steel, stone, storm, story, sugar, sunny, sweet, table, taste, teach, thank, theme, thick, tiger, "
    "title, toast, tooth, topic, tower, track, trade, train, trend, trial, truck, trust, uncle, under, union, upper, "
    "urban, usual, value, video, visit, vivid, voice, wagon, waste, watch, water, whale, wheat, wheel, white, world, "
    "worth, wrist, write, young, youth, zebra"
)
RULES = """Guess the word of five letters. A guess is five letters alone.
Each letter of a guess is marked: G, it is right; Y, it is in the word, at another place; -, it is not in the word."""


class GuessWordEnv:
    """A game with 1.0 for the right word; after the last wrong guess it is lost, with 0. Any five letters may be
    guessed.
    """

    def __init__(self, guesses: int = 6) -> None:
        """Set the number of guesses. ValueError below 1."""
        if guesses < 1:
            raise ValueError(f"guesses={guesses}: at least 1")
        self._guesses, self._secret = guesses, WORDS[0]
        self._known: list[str] = []

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw the word of this seed."""
        self._secret, self._known = random.Random(seed).choice(WORDS), []
        return f"I think of a word. You have {self._guesses} guesses.", {"instruction": RULES, "state_key": ""}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Mark a guess. A text that is not five letters costs no guess."""
        guess = action.strip().lower()
        valid = len(guess) == 5 and guess.isascii() and guess.isalpha()
        line = f"{guess} {mark(guess, self._secret)}" if valid else ""
        effective = valid and line not in self._known
        self._known += [line] if valid else []
        left, found = self._guesses - len(self._known), guess == self._secret
        metrics = {
            "success": float(found),
            "action_is_valid": float(valid),
            "action_is_effective": float(effective),
        }
        said = f"{line}\nYou have {left} guesses left." if valid else "A guess is five letters."
        if found or not left:
            said = f"{line}\n{'Right!' if found else f'No guesses are left. It was {self._secret}.'}"
        known = "\n".join(self._known)
        info = {"metrics": metrics, "metrics_agg_mode": {"success": "last"}, "state_key": known, "board": known}
        return said, float(found), found or not left, False, info

    def solution(self) -> list[str]:
        """Return a word that fits all marks, none at the end: an oracle for demonstrations."""
        over = len(self._known) == self._guesses or any(line.endswith("GGGGG") for line in self._known)
        return [] if over else [next(word for word in WORDS if _fits(word, self._known))]


def _fits(word: str, known: list[str]) -> bool:
    """Return True if a word would have got these marks."""
    return all(mark(line[:5], word) == line[6:] for line in known)


def mark(guess: str, secret: str) -> str:
    """Return the marks of a guess. A letter is marked as often as the word has it, right places first."""
    marks = ["G" if a == b else "-" for a, b in zip(guess, secret, strict=True)]
    left = [b for a, b in zip(guess, secret, strict=True) if a != b]
    for i, letter in enumerate(guess):
        if marks[i] == "-" and letter in left:
            marks[i] = "Y"
            left.remove(letter)
    return "".join(marks)
