"""Questions that need tools, their answers, and a corpus of fictitious towns and people.

Everything is drawn from seeds: the corpus from its own, a question from the episode's. No answer can be memorised from
pre-training.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .calculator import calculate
from .retrieval import phrases
from .tool_calls import tool_call

TOWNS = 80
_STARTS = phrases(
    "Bren, Cald, Dorn, Esk, Fal, Garth, Harl, Ister, Kell, Lorm, Mund, Norr, Ost, Pell, Quar, Rav, Sten, Thorn, "
    "Ulv, Wend"
)
_ENDS = phrases("wick, ford, mere, holm, by, stead, haven, moor, field")
_FIRST = phrases(
    "Ada, Bela, Cora, Dunja, Edda, Fenn, Goran, Hild, Ivo, Jola, Karel, Lene, Milo, Nora, Otis, Petra, Rune, "
    "Sanna, Tove, Wim"
)
_LAST = phrases(
    "Abbing, Brandt, Corley, Dahl, Ebner, Falk, Greve, Holt, Ilves, Jansky, Krohn, Lund, Morlan, Nyman, Orsted, "
    "Pohl, Ruud"
)
_RIVERS = phrases("Ashe, Brint, Corra, Delm, Emra, Fesk, Gull, Harn, Ivel, Jorn")
_CRAFTS = phrases("glassmaker, weaver, surveyor, printer, clockmaker, botanist, shipwright, baker")
OPERATIONS = {"Add": "+", "Subtract": "-", "Multiply by": "*", "Divide by": "//"}
"""Operations of a chain: the word for each, and Python's sign for it."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Task:
    """A question and its one right answer."""

    question: str
    answer: str
    calls: tuple[str, ...] = ()
    """Tool calls that reveal the answer."""


@dataclass(frozen=True, slots=True)
class Town:
    """The facts of the corpus about a town and its founder."""

    name: str
    people: int
    founded: int
    river: str
    founder: str
    born: int
    craft: str


def make_towns(seed: int) -> list[Town]:
    """Draw the towns, each with a unique name, founder and number of people."""
    rng = random.Random(seed)
    names = rng.sample([start + end for start in _STARTS for end in _ENDS], TOWNS)
    founders = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], TOWNS)
    people = rng.sample(range(800, 90_000), TOWNS)
    found = []
    for name, founder, number in zip(names, founders, people, strict=True):
        year = rng.randrange(1200, 1800)
        born = year - rng.randrange(25, 60)
        found.append(Town(name, number, year, rng.choice(_RIVERS), founder, born, rng.choice(_CRAFTS)))
    return found


def make_corpus(towns: Sequence[Town]) -> list[str]:
    """Return one text about each town, then one about each founder, without repetition between them."""
    of_towns = [
        f"{t.name} is a town on the river {t.river}. It was founded in {t.founded} by {t.founder}, and has {t.people} "
        "inhabitants."
        for t in towns
    ]
    return of_towns + [f"{t.founder} was a {t.craft}, born in {t.born}." for t in towns]


def chain(rng: random.Random, towns: Sequence[Town]) -> Task:
    """Draw a chain of three to six operations on integers."""
    value = rng.randrange(100, 1000)
    steps, calls = [f"Start with {value}."], []
    for _ in range(rng.randrange(3, 7)):
        number = rng.randrange(12, 100)
        verb, sign = rng.choice(list(OPERATIONS.items()))
        steps.append(f"{verb} {number}" + (" and drop the remainder." if sign == "//" else "."))
        # `//` rounds down, but a dropped remainder rounds towards zero: they differ below zero.
        lost = sign == "//" and value < 0
        calls.append(f"-({-value} // {number})" if lost else f"{value} {sign} {number}")
        value = int(calculate(calls[-1]))
    made = tuple(tool_call("calculator", {"expression": call}) for call in calls)
    return Task(" ".join([*steps, "What is the result?"]), str(value), made)


def lookup(rng: random.Random, towns: Sequence[Town]) -> Task:
    """Draw a question about one or two towns; some need two searches, some a calculation."""
    one, two = rng.sample(towns, 2)
    total, age = f"{one.people} + {two.people}", f"{one.founded} - {one.born}"
    first, second, founder = (tool_call("search", {"query": q}) for q in (one.name, two.name, one.founder))
    add, subtract = (tool_call("calculator", {"expression": text}) for text in (total, age))
    return rng.choice(
        (
            Task(f"Who founded {one.name}?", one.founder, (first,)),
            Task(f"On which river does {one.name} lie?", one.river, (first,)),
            Task(f"How many inhabitants has {one.name}?", str(one.people), (first,)),
            Task(f"In which year was the founder of {one.name} born?", str(one.born), (first, founder)),
            Task(f"What was the craft of the founder of {one.name}?", one.craft, (first, founder)),
            Task(
                f"How many inhabitants have {one.name} and {two.name} together?",
                calculate(total),
                (first, second, add),
            ),
            Task(
                f"How old was the founder of {one.name} in the year of its founding?",
                calculate(age),
                (first, founder, subtract),
            ),
        )
    )


def count(rng: random.Random, towns: Sequence[Town]) -> Task:
    """Draw a question that a short program answers."""
    low, modulus = rng.randrange(1, 1000), rng.randrange(3, 12)
    high, digits = low + rng.randrange(500, 5000), rng.randrange(2, 6)
    wanted = f"n % {modulus} == 0 and sum(map(int, str(n))) % {digits} == 0"
    code = f"print(sum({wanted} for n in range({low}, {high + 1})))"
    answer = sum(n % modulus == 0 and sum(map(int, str(n))) % digits == 0 for n in range(low, high + 1))
    return Task(
        f"How many integers from {low} to {high}, both included, are divisible by {modulus} and have a digit sum that "
        f"is divisible by {digits}?",
        str(answer),
        (tool_call("python", {"code": code}),),
    )


KINDS: dict[str, Callable[[random.Random, Sequence[Town]], Task]] = {"chain": chain, "lookup": lookup, "count": count}


def is_right(said: str, answer: str) -> bool:
    """Return True if a text gives the answer: the last `<answer>...</answer>`, or the whole text without tags.

    If the answer is a number, the text may have words, but no other number. Else the two must be equal except for
    capital letters, `the`, and punctuation: a list of candidates is no answer.
    """
    tagged = _ANSWER.findall(said)
    text = (tagged[-1] if tagged else said).replace("\N{MINUS SIGN}", "-")
    if _NUMBER.fullmatch(answer):
        numbers = {float(number.replace(",", "")) for number in _NUMBER.findall(text)}
        return numbers == {float(answer.replace(",", ""))}
    return _plain(text) == _plain(answer)


def _plain(text: str) -> str:
    return " ".join(word for word in re.findall(r"\w+", text.lower()) if word not in ("the", "a", "an"))
