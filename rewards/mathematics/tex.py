"""The tokens of mathematical text, in TeX or plain, in any script.

Nothing is deleted before it is read: a token keeps the gap before it, and characters outside ASCII (full-width digits,
dashes, `\u00bd`, `x\u00b2`) are spelled in TeX.
"""

import re
import unicodedata
from collections.abc import Container, Sequence
from functools import lru_cache
from typing import NamedTuple

WORDS = frozenset({"yes", "no", "true", "false"})
UNITS = {
    "m": "meter metre", "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre",
    "g": "gram", "kg": "kilogram", "s": "second sec", "h": "hour hr", "min": "minute", "ft": "feet foot",
    "in": "inch inche", "l": "liter litre", "ml": "milliliter millilitre", "lb": "pound", "degree": "deg \\degree",
    "": "dollar", "mph": "", "cent": "", "day": "", "men": "", "am": "", "pm": "", "\\degreec": "", "\\degreef": "",
}  # fmt: skip
SHORT = {long: short for short, names in UNITS.items() for long in [*names.split(), short]}
COUNTS = re.compile(
    r"(and|or|if|mod|where|when|for|with|is|to|choose|times|over|dozen|hundred|thousand|million|billion|trillion|half|"
    r"third|quarter|score|base)s?"
)
"""Words after a number that change its value or show that it is incomplete."""
GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi "
    "psi omega"
)
SYMBOLS = frozenset(
    [*GREEK.split(), *GREEK.title().split(), *["ell", "hbar", "aleph", "varnothing", "infty", "dots", "ldots", "cdots"]]
)
TRIG = ("sin", "cos", "tan", "cot", "sec", "csc")
UNARY = frozenset(f"{arc}{name}{h}" for arc in ("", "a", "ar", "arc") for name in TRIG for h in ("", "h"))
UNARY |= {"ln", "log", "exp", "Re", "Im", "arg"}
MANY = frozenset({"max", "min", "gcd", "lcm"})
NAMES = UNARY | MANY | {"sqrt", "pi", "infty", "infinity", "inf", "oo"}
PLAIN_NAMES = {"infinity": "infty", "inf": "infty", "oo": "infty"}
TEXTS = frozenset(["text", "textbf", "textit", "textrm", "textnormal", "mathrm", "mbox", "operatorname", "mathop"])
BOLD = frozenset({"mathbf", "mathit", "mathsf", "bm", "boldsymbol"})
FONTS = BOLD | {"mathcal", "mathbb", "mathfrak", "vec", "hat", "bar", "tilde", "overline", "underline", "dot"}
SKIPPED = frozenset(["displaystyle", "textstyle", "limits", "nolimits", "left", "right", "big", "Big", "bigg", "Bigg"])
SKIPPED |= {f"{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in "lrm"} | set("$()[]")
SAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge",
    "leqslant": "le", "geqslant": "ge", "lt": "<", "gt": ">", "neq": "ne", "div": "/", "times": "*", "cdot": "*",
    "ast": "*", "lbrace": "{", "rbrace": "}", "lvert": "|", "rvert": "|", "vert": "|", "emptyset": "varnothing",
    "lbrack": "[", "rbrack": "]", "colon": ":", "and": ",", "or": ",", "land": ",", "lor": ",", "percent": "%",
    "imath": "i", "varepsilon": "epsilon", "varphi": "phi", "lg": "log", "simeq": "approx",
}  # fmt: skip
CHARACTERS = dict(
    zip(
        "\u2212\u00b7\u2219\u22c5\u00d7\u00f7\u2215\u2044\u00b0\u00ba\u221e\u2264\u2265\u2260\u2248\u00b1\u2213\u221a"
        "\u222a\u2208\u2205\u3002\u3001\uff0c\uff1b\u27e8\u27e9\u230a\u230b\u2308\u2309\u2032\u2019\u2018\u03bb\u039b",
        re.findall(
            r"\S+",
            "- * * * * / / / ^{\\circ} ^{\\circ} \\infty \\le \\ge \\ne \\approx \\pm \\mp \\surd \\cup "
            "\\in \\varnothing . ,~ ,~ ;~ \\langle \\rangle \\lfloor \\rfloor \\lceil \\rceil ' ' ' \\lambda \\Lambda",
        ),
        strict=True,
    )
)
"""Operators and marks outside ASCII, in TeX."""
TOKEN = re.compile(
    r"(?P<gap>\s+|~|\{,\}|\\[,;:!> ]|\\q?quad(?![A-Za-z]))"
    r"|(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,9}(?!\w|\.\d))?)"
    r"|(?P<degree>\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?(?:\s*(?:\\(?:text|mathrm)\{)?\s*([CF])\b\}?)?)"
    r"|(?P<command>\\[A-Za-z]+|\\.)|(?P<word>[^\W\d_]+)|(?P<sign>\*\*|<=|>=|!=|.)",
    re.DOTALL,
)
RELATIONS = {"=": "=", "<": "<", ">": ">", "<=": "le", ">=": "ge", "!=": "ne"}
RELATIONS |= {f"\\{name}": name for name in ("le", "ge", "ne", "in", "approx")}
OPEN = frozenset(["(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil"])
CLOSE = frozenset([")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil"])


class Unreadable(ValueError):
    """The error for text outside of the grammar above."""


class Token(NamedTuple):
    """A piece of the text: its kind (`number`, `command`, `letter`, `word`, `sign`) and the gap before it."""

    kind: str
    text: str
    gap: str = ""


@lru_cache(maxsize=1024)
def spelled(char: str) -> str:
    """Spell a character outside ASCII in TeX. `\\0` marks superscripts and subscripts that may join neighbours."""
    name, category = unicodedata.name(char, ""), unicodedata.category(char)
    form, _, codes = unicodedata.decomposition(char).rpartition("> ")
    if char in CHARACTERS:
        return CHARACTERS[char] + " " * CHARACTERS[char].startswith("\\")
    if char.isdecimal() or category in ("Pd", "Zs", "Cf"):
        return {"Nd": str(unicodedata.decimal(char, "")), "Pd": "-", "Zs": "~", "Cf": ""}[category]
    if greek := re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", name):
        return f"\\{greek[2].lower() if greek[1] == 'SMALL' else greek[2].capitalize()} "
    if not form:
        return char
    inner = "".join(chr(int(code, 16)) for code in codes.split())
    inner = "".join(one if one.isascii() else spelled(one) for one in inner)
    if form == "<fraction":
        return "\\frac{" + inner.replace("/", "}{") + "}"
    if name.startswith("DOUBLE-STRUCK CAPITAL"):
        return f"\\mathbb{{{inner}}}"
    return f"\0{'^' if form == '<super' else '_'}{{{inner}}}" if form in ("<super", "<sub") else inner


def respelled(text: str) -> str:
    """Return a text with its characters outside ASCII in TeX, except letters without a command."""
    if text.isascii():
        return text
    text = "".join(char if char.isascii() else spelled(char) for char in text)
    return re.sub(r"\}\0[\^_]\{", "", text).replace("\0", "")


@lru_cache(maxsize=4096)
def same_text(text: str) -> str:
    """Return a text in one spelling of spaces, brackets and fonts, to compare unreadable text."""
    said, before = "", ""
    for piece in tokens(text):
        said += " " * bool(piece.gap and before == piece.kind and before in ("number", "word")) + piece.text
        before = piece.kind
    return re.sub(r"\{([^{}\\]|\\[A-Za-z]+)\}", r"\1", said).rstrip(".,;")


def tokens(text: str, words: bool = False) -> list[Token]:
    """Return the tokens of a text. `words`: adjacent letters are a word, as within `\\text{...}`."""
    text = respelled(text)
    if "begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    found: list[Token] = []
    place, gap = 0, ""
    while place < len(text):
        match = TOKEN.match(text, place)
        kind, piece, place = match.lastgroup, match[0], match.end()
        if kind == "gap":
            gap += piece
            continue
        if kind == "command":
            name = piece[1:]
            if name in TEXTS | FONTS and (group := re.compile(r"\s*\{([^{}]*)\}").match(text, place)):
                new, place = _styled(name, group[1], found), group.end()
            elif name in SKIPPED:
                place += name in ("left", "right") and text[place : place + 1] == "."
                continue
            else:
                new = [_command(name)]
        elif kind == "degree":
            scale = re.search("[CF]", piece)
            new = [Token("word", f"\\degree{scale[0]}") if scale else Token("sign", "\\degree")]
        elif kind == "word":
            new = _word(piece, words, found)
        else:
            new = [] if piece in ("$", '"') else [Token(kind, "^" if piece == "**" else piece)]
        found += [new[0]._replace(gap=gap or new[0].gap), *new[1:]] if new else []
        gap = "" if new else gap
    return found


def _command(name: str) -> Token:
    same = SAME.get(name, name)
    if same in ("{", "}"):
        return Token("sign", f"\\{same}")
    if len(same) == 1 and not same.isalpha():
        return Token("sign", same)
    return Token("letter" if same == "i" else "command", same if same == "i" else f"\\{same}")


def _styled(name: str, inner: str, before: Sequence[Token]) -> list[Token]:
    """Return the tokens of `\\text{inner}` and the like: words, names of functions, e and i, or other letters."""
    inner = inner.strip()
    if name in FONTS:
        if name in ("overline", "dot", "bar") and inner.isdecimal():
            return [Token("repeated", inner)]
        same = inner if name in BOLD else f"{name} {inner}"
        return tokens(inner) if inner[:1].isdecimal() else [Token("letter", same)]
    if inner in NAMES or inner in SAME:
        return [_command(PLAIN_NAMES.get(inner, inner))]
    if inner in ("e", "i", "d") or (len(inner) == 1 and inner.isalpha() and not _after_unit(before)):
        return [Token("letter", inner)]
    return [Token("word", ""), *tokens(inner, words=True)] if inner else []


def _after_unit(before: Sequence[Token]) -> bool:
    """Return True if a unit may come next: after a number, a word, or `km/`."""
    kinds = [piece.kind for piece in before[-2:]]
    return kinds[-1:] in (["number"], ["word"]) or (kinds[:1] == ["word"] and before[-1].text == "/")


def _word(run: str, words: bool, before: Sequence[Token]) -> list[Token]:
    """Return a run of letters as a word, the name of a function, or single letters."""
    if run.lower() in ("and", "or", "percent"):
        return [_command(run.lower())]
    short = run.lower() in SHORT or run.lower().rstrip("s") in SHORT
    value = before and (before[-1].kind in ("number", "command") or before[-1].text in ("}", ")"))
    unit = short and ((value and len(run) > 1) or (_after_unit(before) and before[-1].text == "/"))
    if words or unit or run.lower() in WORDS:
        return [Token("word", run)]
    if run in NAMES:
        return [_command(PLAIN_NAMES.get(run, run))]
    if match := re.match(r"(sin|cos|tan|ln|log|sqrt|pi)(?=.$)", run):
        return [_command(match[0]), Token("letter", run[-1])]
    if len(run) > 3 or not run.isascii():
        return [Token("word", run)]
    return [Token("letter", letter) for letter in run]


def closing(pieces: Sequence[Token], start: int = 0) -> int:
    """Return the position of the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(pieces)):
        depth += (pieces[place].text in OPEN) - (pieces[place].text in CLOSE)
        if not depth:
            return place
    raise Unreadable("an open bracket")


def split(pieces: Sequence[Token], marks: Container[str]) -> tuple[list[Sequence[Token]], list[str]]:
    """Return the parts between marks outside of brackets, and these marks."""
    parts, found, start, place = [], [], 0, 0
    while place < len(pieces):
        if pieces[place].text in OPEN:
            place = closing(pieces, place)
        elif pieces[place].text in marks and pieces[place].kind != "word":
            parts.append(pieces[start:place])
            found.append(pieces[place].text)
            start = place + 1
        place += 1
    return [*parts, pieces[start:]], found
