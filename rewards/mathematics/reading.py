"""The meaning of mathematical text: numbers, expressions, texts, lists, points, sets, intervals and equations.

A comma belongs to a number or separates two, depending on the tokens around it. Each meaning has one spelling, its
`key`: for a constant 40 digits (for one with digits far apart, as in `1 + e^{-1000}`, a digest of 1,000), for an
expression its values at three points, for equations and inequalities the difference of both sides.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from mpmath.ctx_mp import MPContext

from .calculation import Calculation, MoreDigits, spelling
from .tex import CLOSE, COUNTS, OPEN, RELATIONS, SHORT, UNARY, Token, Unreadable, closing, split, tokens

CONTEXTS = [MPContext(), MPContext()]
# 100 digits decide nearly all comparisons; 2,000 only those that need more.
CONTEXTS[0].dps, CONTEXTS[1].dps = 100, 2000
END = Token("end", "")
FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}
CURRENCIES = "\u00a3\u20ac\u00a5\u20b9"
NAME = re.compile(r"(\\?[A-Za-z]+)(_.+)?'*")
BASE = re.compile(r"\(?(\d[0-9A-Z]*|[0-9A-Fa-f]{2,}(?=\)?_\{16\}))\)?_(?:\{(\d+)\}|(\d))")
GROUPS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?")


class Reading(NamedTuple):
    """The meaning of a text.

    `kind`: `scalar`, `text`, `list`, `set`, `tuple`, `relation` or `union`. `decimals`: of a decimal number. `names`:
    the text left of `=`, `plain` if it has no number. `equation`: the key of the difference of both sides.
    """

    kind: str
    key: str
    items: tuple["Reading", ...] = ()
    value: Any = None
    decimals: int = 0
    unit: str = ""
    names: str = ""
    plain: bool = True
    equation: str = ""


@lru_cache(maxsize=4096)
def readings(text: str) -> tuple[Reading, ...]:
    """Return the meanings of a text: two if commas may be within numbers as well as between them; none if it is
    unreadable.
    """
    pieces, found = trimmed(tokens(text)), {}
    for loose in (True, False):
        try:
            one = structure(joined(pieces, loose))
        except (Unreadable, ArithmeticError, ValueError, TypeError):
            continue
        found.setdefault((one.kind, one.key), one)
    return tuple(found.values())


def equal(gold: Reading, mine: Reading) -> bool:
    """Return True if an answer means the same as the truth."""
    if gold.equation and gold.equation == mine.equation:
        return True
    if (gold.names and mine.names and gold.names != mine.names) or not (gold.plain or mine.equation):
        return False
    if gold.unit and mine.unit and gold.unit != mine.unit:
        return False
    if gold.kind == mine.kind == "scalar":
        return gold.key == mine.key or near(gold, mine)
    if {gold.kind, mine.kind} <= {"list", "set", "tuple", "scalar"}:
        return same_items(gold, mine)
    return gold.kind == mine.kind and gold.key == mine.key


def near(gold: Reading, mine: Reading) -> bool:
    """Return True if a constant is the other rounded to at least six decimals, or a percentage of it."""
    if gold.value is None or mine.value is None:
        return False
    if "%" in (gold.unit, mine.unit) and gold.unit != mine.unit:
        share, plain = (gold, mine) if gold.unit == "%" else (mine, gold)
        return spelling(CONTEXTS[0], share.value / 100) == plain.key
    for short, other in ((gold, mine), (mine, gold)):
        shown = abs(short.value) * 10**short.decimals if short.decimals >= 6 else 0
        if shown >= 10_000 and abs(short.value - other.value) * 10**short.decimals <= 0.5:
            return True
    return False


def same_items(gold: Reading, mine: Reading) -> bool:
    """Compare lists and sets in any order, tuples in theirs; a list of one element equals this element."""
    few, other = (mine, gold) if gold.kind == "scalar" else (gold, mine)
    if other.kind == "scalar":
        return few.kind != "tuple" and len(few.items) == 1 and equal(other, few.items[0])
    if len(gold.items) != len(mine.items):
        return False
    kinds = {gold.kind, mine.kind}
    if "tuple" in kinds:
        ends = [(one.key[0], one.key[-1]) for one in (gold, mine) if one.kind == "tuple"]
        return "set" not in kinds and ends[0] == ends[-1] and all(map(alike, gold.items, mine.items))
    left = list(mine.items)
    for item in gold.items:
        found = [place for place, other in enumerate(left) if alike(item, other)]
        if not found:
            return False
        del left[found[0]]
    return True


def alike(gold: Reading, mine: Reading) -> bool:
    """Compare two items, of which a set is no element."""
    return gold.kind == mine.kind and equal(gold, mine)


def vote(gold: Sequence[Reading], mine: Sequence[Reading]) -> str:
    """Return the one spelling of an answer for votes, "" if it was not read.

    A unit or name missing in the answer is taken from the truth; a percentage counts as its number if the truth is
    above 1.
    """
    if not mine:
        return ""
    truth = gold[0] if gold else mine[0]
    one = next((one for one in mine if one.kind == truth.kind), mine[0])
    if truth.equation and not truth.plain:
        return one.equation or one.key
    small = truth.unit != "%" and not (truth.value is not None and abs(truth.value) > 1)
    share = one.unit == "%" and one.value is not None and small
    key = spelling(CONTEXTS[0], one.value / 100) if share else one.key
    names = f"{one.names or truth.names}: " * bool(truth.names)
    return names + key + f" {one.unit or truth.unit}" * bool(truth.unit)


def trimmed(pieces: Sequence[Token]) -> Sequence[Token]:
    """Return tokens without a sentence's marks at both ends."""
    start, end = 0, len(pieces)
    while start < end and pieces[start].text in (*",;:#.*", "^"):
        start += 1
    while start < end and pieces[end - 1].text in (*".,;:#*", "^"):
        end -= 1
    return pieces[start:end]


def joined(pieces: Sequence[Token], loose: bool) -> list[Token]:
    """Return the tokens, with numbers in groups of three digits joined into one each.

    Gaps join groups, and so do commas without a gap before a group that begins with 0. `loose`: any commas without a
    gap outside of brackets, or in a bracket whose other commas have gaps.
    """
    found: list[Token] = []
    depth = place = 0
    while place < len(pieces):
        first, end = pieces[place], place + 1
        depth += (first.text in OPEN and first.text != "{") - (first.text in CLOSE and first.text != "}")
        run = first.text
        while first.kind == "number" and end < len(pieces):
            after = end + (pieces[end].text == "," and not pieces[end].gap)
            if after == len(pieces) or pieces[after].kind != "number" or (after > end) == bool(pieces[after].gap):
                break
            run, end = f"{run}{',' if after > end else ' '}{pieces[after].text}", after + 1
        comma, then = [*pieces[end : end + 2], END, END][:2]
        mixed = (comma.text == "," and then.gap) or (found and found[-1].text == "," and first.gap)
        if GROUPS.fullmatch(run) and comma.text != "/" and (" " in run or (loose and (not depth or mixed))):
            run = re.sub("[ ,]", "", run)
        elif first.kind == "number":
            run = re.sub(r"(?<!\d)[1-9]\d{0,2}(?:,\d{3})*,0\d\d(?!\d)", lambda match: match[0].replace(",", ""), run)
        parts = re.split("([ ,])", run) if first.kind == "number" else [run]
        found += [first._replace(text=parts[0])]
        for mark, part in zip(parts[1::2], parts[2::2], strict=True):
            found += [Token("sign", ",")] * (mark == ",") + [Token("number", part, " " if mark == " " else "")]
        place = end
    return found


def structure(pieces: Sequence[Token], depth: int = 0) -> Reading:
    """Return the meaning of a list, a relation, a union, or a single element."""
    if depth > 20 or not pieces:
        raise Unreadable("too deep, or nothing")
    parts, commas = split(pieces, ",;")
    if commas:
        return collection("list", [structure(part, depth + 1) for part in parts if part])
    sides, operators = split(pieces, RELATIONS)
    if operators:
        return relation(sides, [RELATIONS[operator] for operator in operators], depth + 1)
    parts, unions = split(pieces, ["\\cup"])
    if unions:
        return collection("union", [structure(part, depth + 1) for part in parts])
    parts, colons = split(pieces, ":")
    if colons:
        return bracket("::", [structure(part, depth + 1) for part in parts])
    return element(pieces, depth + 1)


def element(pieces: Sequence[Token], depth: int) -> Reading:
    """Return the meaning of a bracket, a text, a number of another base or an expression, with or without a unit."""
    first, last = pieces[0], pieces[-1]
    if first.kind == "word":
        if not first.text and len(pieces) > 1 and pieces[1].kind != "word":
            return structure(pieces[1:], depth)
        if any(piece.kind == "command" for piece in pieces):
            raise Unreadable("text and mathematics")
        said = "".join(" " * bool(piece.gap or piece.kind == "word") + piece.text for piece in pieces)
        return Reading("text", " ".join(re.findall(r"[^\s(){}.!']+", said.casefold())))
    if first.text in CURRENCIES:
        return structure(pieces[1:], depth)._replace(unit=first.text)
    if last.text in ("%", *CURRENCIES) or (
        last.text == "\\degree" and not any(piece.text[1:] in UNARY for piece in pieces)
    ):
        return structure(pieces[:-1], depth)._replace(unit=SHORT.get(last.text, last.text))
    if first.text in OPEN and closing(pieces) == len(pieces) - 1 and first.text[1:] not in ("lfloor", "lceil"):
        parts, commas = split(pieces[1:-1], ",;")
        if first.text == "\\{" or (commas and first.text == "{"):
            return collection("set", [structure(part, depth) for part in parts if part])
        if commas:
            return bracket(first.text + last.text, [structure(part, depth) for part in parts])
        return structure(pieces[1:-1], depth)
    text = "".join(piece.text for piece in pieces)
    if text == "\\varnothing":
        return collection("set", [])
    if text == "mathbb R":
        return bracket("()", [Reading("scalar", "-oo"), Reading("scalar", "oo")])
    if based := BASE.fullmatch(text):
        value, base = int(based[1], int(based[2] or based[3])), based[2] or based[3]
        return scalar(tokens(str(value))) if base == "10" else Reading("text", f"{value}_{base}")
    return scalar(pieces)


def scalar(pieces: Sequence[Token]) -> Reading:
    """Return the meaning of an expression: its value, or its values at three points if it has symbols."""
    if any(piece.text in ("\\pm", "\\mp") for piece in pieces):
        return collection("list", [_scalar(pieces, sign) for sign in (1, -1)])
    return _scalar(pieces, 1)


def _scalar(pieces: Sequence[Token], sign: int) -> Reading:
    for context in CONTEXTS:
        try:
            first = Calculation(context, 0, sign)
            value = first.of(pieces, whole=False)
            keys = [spelling(context, value)]
            rest = first.rest
            for place in (1, 2) if first.symbols else ():
                keys.append(_at(Calculation(context, place, sign), pieces[: len(pieces) - len(rest)]))
        except MoreDigits:
            continue
        one = len(set(keys)) == 1
        number = pieces[-1 - len(rest)] if len(pieces) - len(rest) <= 2 else END
        decimals = re.fullmatch(r"\d*\.(\d+)", number.text)
        found = Reading("scalar", keys[0] if one else " | ".join(keys), value=value if one else None)
        return found._replace(decimals=len(decimals[1]) if decimals else 0, unit=unit(rest) if rest else "")
    return Reading("scalar", " ".join(piece.text for piece in pieces))


def _at(calculation: Calculation, pieces: Sequence[Token]) -> str:
    """Return an expression's value at a point; one that is not real has none at negative symbols."""
    try:
        key = spelling(calculation.context, calculation.of(pieces))
    except ZeroDivisionError:
        return "none"
    return "none" if "i" in key else key


def unit(pieces: Sequence[Token]) -> str:
    """Return a unit in one spelling, as `m^2`. Unreadable for words that say more than a unit."""
    words = [piece.text.lower() for piece in pieces if piece.kind == "word" and piece.text]
    marks = [piece.text for piece in pieces if piece.kind != "word" and piece.text not in "{}."]
    if not words or any(map(COUNTS.fullmatch, words)) or not all(mark in "^/-" or mark.isdecimal() for mark in marks):
        raise Unreadable("no unit")
    return "".join([*(SHORT.get(word, SHORT.get(word.rstrip("s"), word.rstrip("s"))) for word in words), *marks])


def collection(kind: str, items: Sequence[Reading]) -> Reading:
    """Return a list, set or union, whose order and repetitions do not count.

    A nested list is flattened, and a list of inequalities is a union.
    """
    spread = [one for item in items for one in (item.items if item.kind == "list" else (item,))]
    distinct = tuple({one.key + one.unit: one for one in spread}.values())
    if kind == "list" and len(distinct) == 1:
        return distinct[0]
    if kind == "union" or (kind == "list" and all(one.kind == "tuple" and one.names for one in distinct)):
        return Reading("union", " U ".join(sorted(one.key for one in distinct)), distinct)
    return Reading(kind, f"{{{', '.join(sorted(one.key for one in distinct))}}}", distinct)


def bracket(ends: str, items: Sequence[Reading]) -> Reading:
    """Return a point, interval or ratio; with more than two elements the kind of bracket does not count."""
    ends = "()" if "\\" in ends or (len(items) > 2 and ":" not in ends) else ends
    return Reading("tuple", f"{ends[0]}{', '.join(one.key for one in items)}{ends[-1]}", tuple(items))


def relation(sides: Sequence[Sequence[Token]], operators: Sequence[str], depth: int) -> Reading:
    """Return the right side of an equation of a name, the interval of an inequality of one name, or else the difference
    of both sides.
    """
    names = ["".join(piece.text for piece in side) for side in sides]
    if set(operators) <= {"=", "approx", "in"}:
        plain = not any(piece.kind == "number" for piece in sides[0])
        exact = operators.index("approx") if "approx" in operators else len(operators)
        found = structure(sides[exact or (len(operators) if plain else 0)], depth)
        key = "" if len(sides) > 2 or "in" in operators else difference(*sides)
        return found._replace(names=names[0], plain=plain, equation=key)
    if len(sides) == 2 and operators[0] in FLIPPED and NAME.fullmatch(names[1]):
        sides, names, operators = sides[::-1], names[::-1], [FLIPPED[operators[0]]]
    if len(sides) == 3 and set(operators) <= {">", "ge"}:
        sides, operators = sides[::-1], [FLIPPED[operator] for operator in reversed(operators)]
    name, least, most = names[len(sides) > 2], CONTEXTS[0].ninf, CONTEXTS[0].inf
    if NAME.fullmatch(name) and (len(sides) == 2 or set(operators) <= {"<", "le"}):
        ends = [structure(side, depth) for side in sides if side is not sides[len(sides) > 2]]
        if len(ends) == 2 or (operators[0] in FLIPPED and ends[0].value is not None):
            if len(ends) == 1 and operators[0] in ("<", "le"):
                ends, operators = [Reading("scalar", "-oo", value=least), *ends], ["<", *operators]
            elif len(ends) == 1:
                ends, operators = [*ends, Reading("scalar", "oo", value=most)], [FLIPPED[operators[0]], "<"]
            return bracket("(["[operators[0] == "le"] + ")]"[operators[1] == "le"], ends)._replace(names=name)
    parts = []
    for operator, left, right in zip(operators, sides, sides[1:], strict=False):
        if operator in (">", "ge"):
            operator, left, right = FLIPPED[operator], right, left
        parts.append(f"{operator} {difference(left, right, signed=operator != 'ne')}")
        if not parts[-1].split()[1:]:
            raise Unreadable("a relation of what cannot be computed")
    return Reading("relation", " and ".join(sorted(parts)))


def difference(left: Sequence[Token], right: Sequence[Token], signed: bool = False) -> str:
    """Return the key of the difference of two sides up to a factor, a positive one if `signed`; "" without one."""
    values, context = [], CONTEXTS[0]
    if any(piece.text in ("\\pm", "\\mp") for piece in (*left, *right)):
        return ""
    try:
        for place in range(4):
            calculation = Calculation(context, place)
            x, y = calculation.of(left), calculation.of(right)
            values.append(calculation.add(x, -y))
        by = abs(values[0]) if signed else values[0]
        return " | ".join(spelling(context, value / by) for value in values) if calculation.symbols else ""
    except (Unreadable, ArithmeticError, ValueError, TypeError):
        return ""
