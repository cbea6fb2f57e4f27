"""A calculator for models: Python's arithmetic without variables, other calls or numbers of unbounded size."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 400
MAX_BITS = 4096
"""Largest integer anywhere in a calculation, in bits."""


def _round(number: float, digits: int = 0) -> float:
    if not 0 <= digits <= 30:
        raise ValueError("round takes 0 to 30 digits")
    return round(number, digits) if digits else round(number)


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "floor": math.floor,
    "ceil": math.ceil,
    "gcd": math.gcd,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> str:
    """Return the value of an expression such as `(3 + 4) * sqrt(2)`. ValueError with the reason, if it has none."""
    text = expression.strip().replace("^", "**").replace("\N{MULTIPLICATION SIGN}", "*").replace("\N{MINUS SIGN}", "-")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        found = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"not an expression: {expression:.80}") from None
    except (ArithmeticError, TypeError) as error:
        raise ValueError(str(error)) from None
    if isinstance(found, float) and found.is_integer() and abs(found) < 1e15:
        return str(int(found))
    return repr(found) if isinstance(found, float) else str(found)


# The syntax tree is walked by hand; `eval`, even without builtins, would let an action run code.
def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            found = value
        case ast.Name(id=name) if name in _CONSTANTS:
            found = _CONSTANTS[name]
        case ast.UnaryOp() if type(node.op) in _UNARY:
            found = _UNARY[type(node.op)](_value(node.operand))
        case ast.BinOp() if type(node.op) in _BINARY:
            left, right = _value(node.left), _value(node.right)
            whole = isinstance(left, int) and isinstance(right, int)
            # Checked before the power is computed: `9**9**9` would take all memory.
            if isinstance(node.op, ast.Pow) and whole and left.bit_length() * abs(right) > MAX_BITS:
                raise ValueError("the result is too large")
            found = _BINARY[type(node.op)](left, right)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            found = _FUNCTIONS[name](*[_value(argument) for argument in node.args])
        case _:
            raise ValueError(f"not arithmetic: {ast.unparse(node):.80}")
    if isinstance(found, complex):
        raise ValueError("the result is not a real number")
    if isinstance(found, int) and found.bit_length() > MAX_BITS:
        raise ValueError("the result is too large")
    return found
