"""The value of an expression, computed from its tokens by precedence.

Symbols have values made from their names, so that an expression is identified by its values at some points. Text
outside of the grammar (integrals, matrices) raises `Unreadable`; a number with more digits than are computed,
`MoreDigits`.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any
from zlib import crc32

from mpmath.ctx_mp import MPContext

from .tex import MANY, SYMBOLS, TRIG, UNARY, Token, Unreadable, closing, split

MAX_DEPTH, MAX_BITS = 40, 4000
"""Limits: deeper nesting is not read; exponents and arguments from two to this power on are not computed."""
STARTS = {f"\\{name}" for name in (*UNARY, *MANY, "frac", "sqrt", "surd", "binom", "langle", "lfloor", "lceil")}
APPLIED = frozenset("fghFGHPE")
"""Symbols that a following bracket makes a function, even with a single argument."""
END = Token("end", "")


class MoreDigits(ArithmeticError):
    """The error for a number with more digits than are computed."""


class Calculation:
    """A reader of one expression at one point: `of` returns its value, and `rest` are the remaining tokens."""

    def __init__(self, context: MPContext, place: int = 0, sign: int = 1) -> None:
        """Choose the point by number: at 0 all symbols are positive, at 1 all negative. `sign` is that of `\\pm`."""
        self.context, self._at, self._sign, self._depth = context, place, sign, 0
        self.symbols: set[str] = set()
        self.rest: Sequence[Token] = ()

    def of(self, pieces: Sequence[Token], whole: bool = True) -> Any:
        """Return the value of the expression at the start of the tokens; `whole`: of all of them."""
        before, self.rest = self.rest, pieces
        value = self._sum()
        if whole:
            if self.rest:
                raise Unreadable("more than an expression")
            self.rest = before
        return value

    def _peek(self, ahead: int = 0) -> Token:
        return self.rest[ahead] if ahead < len(self.rest) else END

    def _take(self, *texts: str) -> str:
        """Return the next token's text and consume it, if it is one of these."""
        text = self._peek().text
        self.rest = self.rest[text in texts :]
        return text if text in texts else ""

    def _inside(self) -> Sequence[Token]:
        """Consume a bracket and return its content."""
        end = closing(self.rest)
        inner, self.rest = self.rest[1:end], self.rest[end + 1 :]
        return inner

    def _sum(self) -> Any:
        total = None
        while (sign := self._take("+", "-", "\\pm", "\\mp")) or total is None:
            factor = {"-": -1, "\\pm": self._sign, "\\mp": -self._sign}.get(sign, 1)
            term = factor * self._product()
            total = term if total is None else self.add(total, term)
        return total

    def _product(self) -> Any:
        value = self._factor()
        while True:
            if operator := self._take("*", "/"):
                sign = -1 if self._take("-", "+") == "-" else 1
                factor = sign * self._factor()
                value = value / factor if operator == "/" else value * factor
            elif self._starts():
                value *= self._factor()
            else:
                return value

    def _starts(self) -> bool:
        """Return True if a factor may begin here; a number does not follow a number."""
        kind, text, _ = self._peek()
        if kind == "command":
            return text in STARTS or text[1:] in SYMBOLS
        return kind == "letter" or text in ("(", "[", "{", "|") or (kind == "number" and self._before != "number")

    def _factor(self, powers: bool = True) -> Any:
        before, self._depth = self._peek().kind, self._depth + 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("too deep")
        value = self._atom()
        while text := powers and self._take("^", "!", "%", "\\degree"):
            before = text
            if text == "^":
                sign = -1 if self._take("-", "+") == "-" else 1
                value = self.power(value, sign * self._factor(powers=False))
            elif text == "!":
                value = self.call("factorial", value)
            else:
                value = value / 100 if text == "%" else value * self.context.pi / 180
        self._before, self._depth = before, self._depth - 1
        return value

    def _argument(self) -> Any:
        """Return the value of an argument of a TeX command: a group, one digit or one token."""
        piece = self._peek()
        if piece.kind != "number" or len(piece.text) == 1 or not piece.text.isdecimal():
            return self._factor(powers=False)
        self.rest = [piece._replace(text=piece.text[1:], gap=""), *self.rest[1:]]
        return self.context.mpf(piece.text[0])

    def _atom(self) -> Any:
        kind, text, _ = self._peek()
        if text in ("(", "[", "{", "\\{", "\\langle"):
            return self.of(self._inside())
        if text in ("\\lfloor", "\\lceil"):
            return self.call(text[2:], self.of(self._inside()))
        self.rest = self.rest[1:]
        if kind == "number":
            return self._number(text)
        if text == "|":
            parts, _ = split(self.rest, "|")
            if len(parts) == 1:
                raise Unreadable("an open bar")
            self.rest = self.rest[len(parts[0]) + 1 :]
            return abs(self.of(parts[0]))
        if kind == "letter" or text[1:] in SYMBOLS:
            return self._symbol(text)
        return self._command(text[1:])

    def _number(self, text: str) -> Any:
        """Return the value of a consumed number token: repeating decimals, or an integer before a fraction below 1,
        included.
        """
        if len(text) > 80 and self.context.dps < 1000:
            raise MoreDigits
        value, decimals = self.context.mpf(text), len(text.partition(".")[2])
        if self._peek().text == "." and self._peek(1).kind == "repeated":
            self.rest = self.rest[1:]
        if self._peek().kind == "repeated":
            digits = self._peek().text
            self.rest = self.rest[1:]
            return value + self.context.mpf(digits) / ((10 ** len(digits) - 1) * 10**decimals)
        texts = "".join(self._peek(ahead).text for ahead in range(7)) if text.isdecimal() else ""
        found = re.match(r"\\frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))", texts)
        if not found and self._peek().gap and self._peek().kind == self._peek(2).kind == "number":
            found = re.match(r"(\d+)()/(\d+)()", texts)
        if not found or not 0 < int(found[1] or found[2]) < int(found[3] or found[4]):
            return value
        if self._take("\\frac"):
            return value + self._argument() / self._argument()
        self.rest = self.rest[3:]
        return value + self.context.mpf(found[1]) / int(found[3])

    def _symbol(self, text: str) -> Any:
        context = self.context
        constants = {"\\pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1), "\\infty": context.inf}
        if text in constants and self._peek().text != "_":
            return constants[text]
        while mark := self._take("_", "'", "\\prime"):
            if mark == "_" and self._peek().text == "{":
                mark += "".join(piece.text for piece in self._inside())
            elif mark == "_":
                mark, self.rest = mark + self._peek().text, self.rest[1:]
            text += mark.replace("\\prime", "'")
        if text in ("\\Gamma", "\\zeta") and self._peek().text == "(":
            return self.call(text[1:].lower(), self.of(self._inside()))
        if self._peek().text == "(":
            parts, commas = split(self.rest[1 : closing(self.rest)], ",;")
            if commas or text.rstrip("'") in APPLIED:
                self._inside()
                text += f"({', '.join(spelling(context, self.of(part)) for part in parts)})"
        self.symbols.add(text)
        # Values from a hash of the name are the same in every process; `hash` is salted.
        number = crc32(f"{text}{self._at}".encode())
        sign = (1, -1, 1 - 2 * (number // 10007 % 2))[min(self._at, 2)]
        return context.mpf(sign * (number % 9973 + 1000)) / 7001

    def _command(self, text: str) -> Any:
        if text == "frac":
            if "".join(self._peek(ahead).text for ahead in range(5)) == "{d}{d":
                raise Unreadable("a derivative")
            return self._argument() / self._argument()
        if text in ("sqrt", "surd"):
            root = self.of(self._inside()) if self._peek().text == "[" else 2
            value = self._argument() if text == "sqrt" else self._factor(powers=False)
            return self.power(value, self.context.mpf(1) / root)
        if text == "binom":
            return self.call("binomial", self._argument(), self._argument())
        if text in MANY and self._peek().text in ("(", "\\{"):
            return self.call(text, *(self.of(part) for part in split(self._inside(), ",;")[0]))
        if text not in UNARY:
            raise Unreadable(f"{text!r} begins nothing")
        power, base = 1, ()
        while mark := self._take("^", "_"):
            if mark == "_":
                base = (self._argument(),)
            else:
                power = -1 if self._take("-") else 1
                power *= self._factor(powers=False)
        if self._peek().text in ("(", "[", "{"):
            value = self._factor(powers=False)
        else:
            value = self._factor()
            while self._starts() and self._peek().text[1:] not in UNARY:
                value *= self._factor()
        return self.call(f"arc{text}", value) if power == -1 else self.power(self.call(text, value, *base), power)

    def add(self, x: Any, y: Any) -> Any:
        """Return the sum; 0 if the terms cancel. MoreDigits if one of them is too small to change it."""
        context, total = self.context, x + y
        if isinstance(total, context.mpc):
            real, imag = self.add(context.re(x), context.re(y)), self.add(context.im(x), context.im(y))
            return context.mpc(real, imag) if imag else real
        if x and y and not context.isinf(total) and not context.isnan(total):
            if abs(context.mag(x) - context.mag(y)) > (context.prec - 250 if context.dps > 1000 else 100):
                raise MoreDigits
            return self._exact(total, max(abs(x), abs(y)))
        return total

    def _exact(self, value: Any, size: Any) -> Any:
        """Return 0 for the rounding error of a computation with numbers of a size, else the value."""
        context = self.context
        if isinstance(value, context.mpc):
            real, imag = self._exact(value.real, abs(value)), self._exact(value.imag, abs(value))
            return context.mpc(real, imag) if imag else real
        return context.zero if abs(value) < size * context.mpf(10) ** (15 - context.dps) else value

    def _bounded(self, value: Any, bits: int = MAX_BITS) -> Any:
        if value and not self.context.isinf(value) and self.context.mag(value) > bits:
            raise MoreDigits
        return value

    def power(self, base: Any, power: Any) -> Any:
        """Return a power; odd roots of negative numbers are negative."""
        context = self.context
        if power == 1:
            return base
        if not base:
            if context.re(power) <= 0:
                raise ZeroDivisionError
            return base
        if not isinstance(base, context.mpc) and base < 0 and not context.isint(power):
            for root in (3, 5, 7):
                if not context.im(power) and not self._exact(context.nint(power * root) - power * root, abs(power)):
                    return self.power(-base, power) * (-1) ** int(context.nint(power * root))
        self._bounded(self._bounded(power) * context.log(base))
        return self._exact(context.power(base, power), 0)

    def call(self, name: str, *values: Any) -> Any:
        """Return the value of a function; logarithms are to base 10 by default."""
        context, first = self.context, values[0]
        if name in ("max", "min"):
            return (max if name == "max" else min)(values)
        if name in ("gcd", "lcm"):
            if not all(context.isint(value) for value in values):
                raise Unreadable(f"{name} of no integers")
            return context.mpf(getattr(math, name)(*(int(self._bounded(value)) for value in values)))
        for value in values:
            self._bounded(value, 300 if name in ("factorial", "binomial", "gamma", "zeta") else MAX_BITS)
        if name in ("ln", "log"):
            by = context.log(*values[1:] or [10]) if name == "log" else 1
            return self._exact(context.log(first) / by, abs(first - 1) < 1)
        if len(values) > 1 and name != "binomial":
            raise Unreadable(f"{name} to a base")
        found = getattr(context, re.sub(r"^arc?(?=[sct])", "a", name).lower())(*values)
        if name in ("tan", "sec", "cot", "csc") and context.mag(found) > 3 * context.dps:
            raise ZeroDivisionError
        return self._exact(found, name in (*TRIG, "Re", "Im", "arg") and abs(first) > 1e-9)


def spelling(context: MPContext, value: Any) -> str:
    """Spell a number: as a fraction of few digits if possible, else in decimals."""
    if isinstance(value, context.mpc):
        return (
            f"{spelling(context, value.real)} + {spelling(context, value.imag)}i"
            if value.imag
            else spelling(context, value.real)
        )
    if context.isnan(value):
        raise Unreadable("no number")
    if context.isinf(value):
        return "oo" if value > 0 else "-oo"
    if context.dps < 1000 and 250 < context.mag(value) < MAX_BITS:
        raise MoreDigits
    if not value or abs(context.mag(value)) < 250:
        mantissa, exponent = map(int, value.man_exp)
        exact = mantissa * Fraction(2) ** exponent
        near = exact.limit_denominator(10**20)
        if abs(near - exact) <= exact / 10 ** (context.dps - 15):
            return str(near if value >= 0 else -near)
    shown = context.nstr(value, 40)
    return (
        shown
        if context.dps < 1000
        else f"{shown}#{hashlib.sha256(context.nstr(value, 1000).encode()).hexdigest()[:16]}"
    )
