# ruff: noqa: E501 - programs in strings
"""The judge: tests and code in two processes, with plain values between."""

import contextlib
import json
import math
import random
import socket
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction

import pytest

from spmd_rl.sandbox.guest import values
from spmd_rl.sandbox.guest.handed import Stubs
from spmd_rl.sandbox.guest.link import Gone, Link
from spmd_rl.sandbox.guest.serve import CodeServer
from spmd_rl.sandbox.guest.stubs import FAULTS, Client, Refused
from spmd_rl.sandbox.guest.survey import BadTests, Survey
from tests.unit.sandbox.conftest import TIGHT

pytestmark = pytest.mark.judge
MOST = 1 << 20
Point = namedtuple("Point", "x y")


# -- values ---------------------------------------------------------------------------------------------------------


def sent(*roots):
    """The values as the other side gets them."""

    def no_form(value):
        raise TypeError(type(value))

    body = values.dumps(list(values.encode(roots, no_form)))
    return values.decode(*values.loads(body), {})


PLAIN = [
    [None, True, 0, -1.5, "é\ud800", [], {}, (), set()],
    {"a": [1, (2, {3: frozenset([4])})], (5, 6): {7, 8}, None: b"9", True: bytearray(b"10")},
    [3 + 4j, range(1, 9, 2), int, Decimal("1.10"), Fraction(1, 3), 10**4_000, -(2**64), 2**63],
    [date(2020, 1, 2), datetime(2020, 1, 2, 3, tzinfo=UTC), time(4, 5), timedelta(days=-1, microseconds=7)],
    [deque([1, 2], 5), Counter("aab"), OrderedDict([(2, 1), (1, 2)]), defaultdict(list, a=[1]), Point(1, [2])],
    [math.inf, -math.inf, -0.0, 1e308, 5e-324],
]


@pytest.mark.parametrize("value", PLAIN)
def test_plain_values_arrive_as_they_were(value):
    (found,) = sent(value)
    assert found == value
    items = value.values() if isinstance(value, dict) else value
    assert list(map(type, found.values() if isinstance(value, dict) else found)) == list(map(type, items))


def test_one_object_stays_one_even_in_itself():
    inner, loop = [1], []
    loop += [inner, inner, (loop,)]
    found, again = sent(loop, inner)
    assert found[0] is found[1] is again and found[2][0] is found


def test_nesting_has_no_limit():
    value = ()
    for _ in range(20_000):
        value = [(value,)]
    (found,) = sent(value)
    for depth in range(40_000):
        (found,) = found
    assert found == () and depth == 39_999


class Liar(list):
    """A list that would answer for itself."""


class Named(Point):
    """A named tuple with more than its fields."""


@pytest.mark.parametrize(
    "value", [Liar(), Named(1, 2), True.__class__.__class__, print, defaultdict(lambda: 1), object()]
)
def test_what_may_answer_for_itself_is_no_value(value):
    with pytest.raises(TypeError):
        sent([value])


# -- questions ------------------------------------------------------------------------------------------------------


def ask(names: dict):
    """A client that asks a server in another thread."""
    ours, theirs = socket.socketpair()
    link = Link(theirs.fileno(), MOST)
    server = CodeServer(link, names)

    def serve():
        with theirs, contextlib.suppress(Gone):
            while True:
                server.answer(link.receive())

    threading.Thread(target=serve, daemon=True).start()
    client = Client(Link(ours.fileno(), MOST), None)
    client.socket = ours
    return client


def test_a_call_changes_the_arguments_of_the_tests_at_any_depth():
    def change(grid, table, tags):
        grid[1].append(grid[0])
        table["x"] = tags
        tags.clear()
        return grid

    call = ask({"f": change}).name("f")
    grid, table, tags = [[1], [2]], defaultdict(int), {3}
    assert call(grid, table, tags=tags) is grid
    assert grid == [[1], [2, [1]]] and grid[1][1] is grid[0] and table["x"] is tags and not tags


def test_an_argument_that_the_code_keeps_is_changed_later():
    kept = []

    def keep(items):
        kept.append(items)

    client = ask({"keep": keep, "add": lambda value: kept[0].append(value)})
    items = [1]
    client.name("keep")(items)
    items.append(2)
    client.name("keep")(items)
    client.name("add")(3)
    assert items == [1, 2, 3] and kept[0] is kept[1] and kept[0] == items


def test_a_container_of_the_codes_is_one_object_on_both_sides():
    kept = {"list": [[1]], "dict": {}, "set": {1}, "bytes": bytearray(b"1")}
    client = ask(
        {"get": kept.get, "add": lambda: (kept["list"][0].append(2), kept["set"].add(2), kept["bytes"].append(50))}
    )
    get, add = client.name("get"), client.name("add")
    rows, table, tags, text, keys = get("list"), get("dict"), get("set"), get("bytes"), kept["dict"].keys()
    add()
    assert rows == [[1, 2]] and tags == {1, 2} and text == b"12" and get("list") is rows
    rows[0].clear()
    table["x"] = rows[0]
    get("list").append(3)
    assert (
        get("dict") is table
        and kept["list"] == [[], 3]
        and kept["dict"]["x"] is kept["list"][0]
        and list(keys) == ["x"]
    )


def test_what_nobody_has_any_more_is_forgotten():
    kept = []
    client = ask({"new": lambda n: [[n] for _ in range(n)], "one": lambda: kept})
    held = client.name("new")(3)
    for _ in range(500):
        client.name("new")(5)
        client.name("one")().append(1)
    assert client.name("one")() is client.name("one")() and len(kept) == 500 and held == [[3], [3], [3]]


class Box:
    def __init__(self, value):
        self.value = value

    def twice(self):
        return 2 * self.value

    def me(self):
        return self

    __eq__ = __lt__ = __contains__ = __bool__ = __hash__ = lambda *_: True


USES = [
    lambda box: box == 5,
    lambda box: box != 5,
    lambda box: 7 in box,
    lambda box: box in {1: 2},
    lambda box: len(box),
    lambda box: list(box),
    lambda box: bool(box),
    lambda box: isinstance(box, int),
    lambda box: box.__dict__,
    lambda box: box[0],
    lambda box: abs(box - 1.0),
    lambda box: math.isclose(box, 1.0),
    lambda box: json.dumps(box, default=lambda it: it.__dict__),
    lambda box: type("Sub", (box,), {}),
    lambda box: box.twice(lambda: 1),
    lambda box: box.twice(object()),
    lambda box: setattr(box, "value", json.dumps),
]


@pytest.mark.parametrize("use", USES)
def test_nothing_else_about_an_object_is_believed(use):
    client = ask({"make": Box})
    box = client.name("make")(3)
    assert box.value == 3 and box.twice() == 6 and box.me() is box
    box.value = [4]
    assert box.twice() == [4, 4]
    with pytest.raises(Refused):
        use(box)
    assert client.beyond


def handed(source):
    """A function as tests write it."""
    return eval(source, {"__name__": "tests"})


def test_the_code_calls_what_it_was_handed_until_its_call_ends():
    kept = []
    call = ask({"use": lambda f, x: kept.append(f) or f(x), "again": lambda: kept[0](5)})
    double = handed("lambda x: [x, 2 * x]")
    assert call.name("use")(double, 3) == [3, 6] and call.name("again")() == [5, 10]
    with pytest.raises(RuntimeError, match="after the call"):
        kept[0](1)


@pytest.mark.parametrize("number", [1, -1, True, None, 0.0, "0", [0]])
def test_the_code_can_name_no_function_but_those_that_it_was_handed(number):
    called = []

    def use(f):
        kept = [cell.cell_contents for cell in f.__globals__["_call"].__closure__]
        next(each for each in kept if isinstance(each, Stubs))._ask(number, "call", [1], {})

    client = ask({"use": use})
    with pytest.raises(Refused):
        client.name("use")(eval("lambda x: called.append(x)", {"__name__": "tests", "called": called}))
    assert client.gone and not called


def raising(error):
    def call():
        raise error

    return call


class Odd(KeyError, AttributeError):
    def __str__(self):
        return "odd"


def test_exceptions_are_builtins_here():
    client = ask(
        {"key": raising(KeyError("k")), "odd": raising(Odd(1, [2])), "missing": raising(FileNotFoundError(2, "x"))}
    )
    with pytest.raises(KeyError, match="'k'"):
        client.name("key")()
    with pytest.raises(FileNotFoundError) as missing:
        client.name("missing")()
    assert missing.value.errno == 2
    for base in (KeyError, AttributeError):
        with pytest.raises(base, match="^odd$") as odd:
            client.name("odd")()
        assert odd.value.args == (1, [2]) and type(odd.value) is not base


@pytest.mark.parametrize(
    "error", [StopIteration(3), StopAsyncIteration(), GeneratorExit(), SystemExit(0), KeyboardInterrupt()]
)
def test_what_ends_loops_is_a_failure(error):
    client = ask({"f": raising(error)})
    with pytest.raises(Refused):
        list(map(client.name("f"), [()] * 0)) or client.name("f")()
    assert type(error).__name__ in client.refused


def test_a_name_that_the_code_lacks_is_refused():
    with pytest.raises(Refused, match="defines no g"):
        ask({"f": 1}).name("g")(2)


def test_answers_that_are_none_are_the_codes_failure():
    """Whatever comes back, a call returns a plain value, or raises a builtin exception or what no test can expect."""
    dice = random.Random(0)
    atoms = [
        "=",
        "?",
        "!",
        "~=",
        "refused",
        "list",
        "dict",
        "named",
        "handle",
        "known",
        "ndarray",
        "type",
        "builtins.range",
        "int",
    ]
    atoms += ["KeyError", "print", "", 0, 1, -1, 1e308, None, True, "decimal.Decimal", "x" * 50, [], [0], [-1]]

    def noise(depth):
        if depth == 0 or dice.random() < 0.3:
            return dice.choice(atoms)
        return [noise(depth - 1) for _ in range(dice.randrange(7))]

    for _ in range(1000):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            message = noise(4) if dice.random() < 0.3 else [dice.choice(atoms[:5]), *(noise(3) for _ in range(4)), ""]
            Link(theirs.fileno(), MOST).send(message)
            client = Client(Link(ours.fileno(), MOST), None)
            try:
                client.name("f")([1], {2: 3})
            except (Refused, Exception) as error:  # noqa: BLE001 - which one is the question
                assert isinstance(error, Refused) or type(error).__module__ in ("builtins", "solution"), error
                assert bool(client.gone or client.refused) == isinstance(error, Refused)


# -- what needs more ------------------------------------------------------------------------------------------------

BEYOND = [
    "from solution import f\nclass A:\n    @f\n    def g(self): return 1\nassert A().g() == 1",
    "from solution import f\nclass A:\n    @f(1)\n    def g(self): return 1\nassert A().g() == 1",
    "from solution import Base\nclass Own(Base): pass\nassert Own().f() == 1",
    "assert (Vector(1) + Vector(2)).x == 3",
    "with Timer() as t:\n    assert t.x == 1",
    "def test_f(tmp_path): assert f(tmp_path) == 1",
    "def test_f(monkeypatch): assert f(1) == 1",
    "import pytest\nwith pytest.warns(UserWarning): f(1)",
    "import threading\nassert f(1) == 2",
    "from unittest.mock import patch\nassert f(1) == 2",
    "import os\nassert f('x') == 2",
    "import sys\nsys.stdin = None\nassert f(1) == 2",
    "import time\ntime.sleep = None\nassert f(1) == 2",
    "assert eval('f(1)') == 2",
    "try:\n    from solution import f\nexcept ImportError:\n    f = None\nassert f(1) == 2",
    "v = Vector(1)\nassert (v * 3).x == 3",
    "s = Bag([1])\nassert 1 in s",
    "assert Version(1) < Version(2)",
]


@pytest.mark.parametrize("source", BEYOND)
def test_what_reaches_beyond_values_is_told_from_the_text(source):
    assert Survey(source).reason


@pytest.mark.parametrize(
    "source",
    [
        "def check(candidate):\n    assert candidate([1]) == [2]\ncheck(f)",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.x = []\n"
        "        self.x.append(f(1))",
        "import pytest\n@pytest.mark.parametrize('a', [1])\ndef test_f(a):\n"
        "    with pytest.raises((KeyError, ValueError)): f(a)",
        "assert type(f(1)) is int and type(f(2)) in (list, tuple)",
        "class Own(Exception): pass\ntry:\n    f(1)\nexcept (Own, ValueError):\n    pass",
    ],
)
def test_plain_tests_need_no_more(source):
    assert Survey(source).reason == ""


@pytest.mark.parametrize(
    "source", ["assert f(1) ==", "return f(1)", "import no_such_module\nassert f(1)", "assert f(1)\0"]
)
def test_faults_are_found_in_the_text(source):
    with pytest.raises(BadTests):
        Survey(source)


# -- whole checks ---------------------------------------------------------------------------------------------------


HANDED = [
    "from solution import f\n@f\nasync def g(x): return x\nassert g(1) == 1",
    "class Node:\n    x = 1\nassert f(Node()) == 1",
    "import functools\nassert f(functools.partial(setattr, Exception)) == 1",
    "import io\nassert f(io.StringIO('a')) == 1",
    "def test_f(capsys): assert f(capsys.readouterr) == 1",
    "def test_f(request): assert f(request.getfixturevalue) == 1",
    "import unittest\nclass TestF(unittest.TestCase):\n    def test_f(self): assert f(self.assertEqual) == 1",
    "import pytest\n@pytest.mark.parametrize('g', [Exception.__init__, pytest.raises])\ndef test_f(g): assert f(g) == 1",
]


@pytest.mark.parametrize("code", ["", "def f(x): return 1"])
@pytest.mark.parametrize("test", HANDED)
def test_what_tests_hand_over_without_a_plain_form_is_unsupported_whatever_the_code(sandbox, code, test):
    assert sandbox.check(code, [test], limits=TIGHT).unsupported


@pytest.mark.parametrize(
    "node", [["method", [[0], "__class__"]], ["view", [[0], "clear"]], ["error", ["list"]], ["error", ["exec", "1"]]]
)
def test_a_message_calls_nothing_by_name(node):
    with pytest.raises(FAULTS):
        values.decode([[1]], [["dict", [], None], node], {})


FAULTY = {
    "nothing asked": "x = 1\nassert x == 1",
    "nothing but its own": "def g(x): return x\nassert g(1) == 1",
    "nothing checked": "print(f(1) == 1)",
    "nothing but text": "print('ok')",
    "never called": "def check(candidate):\n    assert candidate(1) == 2",
    "another name": "def verify():\n    assert f(1) == 2",
    "another class": "class Checks:\n    def test_f(self): assert f(1) == 2",
    "a generator": "def test_f():\n    yield f(1)",
    "fails by itself": "import math\nmath.no_such_function(1)\nassert f(1) == 1",
    "a missing module": "import numpy\nassert f(1) == 1",
    "an unknown fixture": "def test_f(no_such_fixture): assert f(1) == 2",
    "endless": "while True: pass",
}


@pytest.mark.parametrize("name", FAULTY)
def test_what_the_code_has_no_part_in_is_the_tests_fault(sandbox, name):
    with pytest.raises(RuntimeError):
        sandbox.check("def f(x): return x", [FAULTY[name]], limits=TIGHT)


def test_the_limit_of_a_message_can_be_set(sandbox):
    code, test = "def f(n): return 'x' * n", "assert len(f(3 << 20)) == 3 << 20"
    assert sandbox.check(code, [test], limits=TIGHT).passed == (True,)
    assert sandbox.check(code, [test], limits=replace(TIGHT, message_bytes=2 << 20)).passed == (False,)


@pytest.mark.mounts
def test_each_test_is_told_apart(sandbox):
    tests = ["assert f(1) == 1", "assert f(2) == 1", "def test_a(): assert f(1) == 1\ndef test_b(): assert f(2) == 1"]
    result = sandbox.check("def f(x): return x", tests, limits=TIGHT)
    assert result.passed == (True, False, True, False) and "AssertionError" in result.detail


def test_the_entry_is_the_codes_and_the_rest_of_the_prelude_ours(sandbox):
    prelude = "def helper(x): return x * 2\ndef f(x):\n    'Doc.'\n"
    test = "def check(candidate):\n    assert candidate(1) == helper(1)\ncheck(f)"
    assert sandbox.check("def f(x): return helper(x)", [test], prelude, "f", TIGHT).passed == (True,)
    assert sandbox.check("def helper(x): return 0\ndef f(x): return 0", [test], prelude, "f", TIGHT).passed == (False,)
    assert sandbox.check("x = 1", [test], prelude, "f", TIGHT).passed == (False,)


def test_tests_without_time_are_no_verdict(sandbox):
    limits = replace(TIGHT, wall_seconds=1.0)
    result = sandbox.check("import time\ndef f(): time.sleep(100)", ["assert f() == 1"], limits=limits)
    assert result.passed == () and result.end == "wall"
