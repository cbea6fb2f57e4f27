# ruff: noqa: E501 - programs in strings
"""The judge: a program and its tests in two processes, and plain values alone between them."""

import contextlib
import copy
import json
import math
import random
import socket
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import replace
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import pytest

from spmd_rl.sandbox.guest import values
from spmd_rl.sandbox.guest.link import Gone, Link
from spmd_rl.sandbox.guest.remote import REFUSED, Client, Refused, Remote
from spmd_rl.sandbox.guest.serve import Program
from spmd_rl.sandbox.guest.survey import BadTests, Survey
from tests.unit.sandbox.conftest import TIGHT

pytestmark = pytest.mark.judge
MOST = 1 << 20


def no_form(value):
    raise TypeError(type(value))


def sent(value):
    """The value as the other side gets it."""
    return values.decode(values.loads(values.dumps(values.encode(value, no_form))), no_form)


PLAIN = [
    [None, True, 0, -1.5, "é\ud83d\ude00", [], {}, (), set()],
    {"a": [1, (2, {3: frozenset([4])})], (5, 6): {7, 8}, None: b"9"},
    [3 + 4j, Decimal("1.10"), Fraction(1, 3), 10**4_000, -(2**64), 2**63, math.inf, -0.0, 5e-324],
]


@pytest.mark.parametrize("value", PLAIN)
def test_plain_values_arrive_as_they_were(value):
    found = sent(value)
    assert found == value and repr(found) == repr(value)


Point, Liar = namedtuple("Point", "x y"), type("Liar", (list,), {"__eq__": lambda *_: True})
Color = IntEnum("Color", "RED")


@pytest.mark.parametrize(
    "value",
    [
        Liar(),
        Point(1, 2),
        Color.RED,
        Counter("a"),
        OrderedDict(),
        defaultdict(list),
        deque(),
        range(3),
        bytearray(),
        print,
        int,
        iter([]),
        object(),
        {}.keys(),
    ],
)
def test_what_is_of_no_plain_type_does_not_travel(value):
    with pytest.raises(TypeError):
        sent([value])


@pytest.mark.parametrize(
    "node",
    [
        ["o", "1"],
        ["o", True],
        ["x", 1],
        [],
        ["d", 1],
        ["s", ["l"]],
        ["b", "g"],
        ["D", "x"],
        ["D", 1],
        ["F", 2, 4],
        ["F", 1, 0],
        ["c", 1, 2],
        [["l"]],
        [None],
        ["d", ["l"], 1],
    ],
)
def test_a_message_makes_plain_values_or_none(node):
    with pytest.raises(values.FAULTS):
        values.decode(node, int)


def ask(names: dict):
    """A client that asks a server in another thread."""
    ours, theirs = socket.socketpair()
    link = Link(theirs.fileno(), MOST)
    server = Program(names)
    link.send(["ready", server.errors()])

    def serve():
        with theirs, contextlib.suppress(Gone):
            while True:
                link.send(server.answer(*link.receive()))

    threading.Thread(target=serve, daemon=True).start()
    client = Client(Link(ours.fileno(), MOST))
    client.socket = ours
    client.greet()
    return client


def test_arguments_come_back_as_they_are_afterwards():
    def change(grid, table, tags, pair):
        grid[1].append(3)
        table["x"] = 1
        tags.clear()
        pair[0].pop()
        return grid

    call = ask({"f": change}).name("f")
    grid, table, tags, pair = [[1], [2]], {}, {3}, ([4], 5)
    result = call(grid, table, tags=tags, pair=pair)
    assert result == grid == [[1], [2, 3]] and result is not grid
    assert table == {"x": 1} and not tags and pair == ([], 5)


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
    lambda box: [box] == [5],
    lambda box: len(box),
    lambda box: list(box),
    lambda box: bool(box),
    lambda box: isinstance(box, int),
    lambda box: isinstance(3, box),
    lambda box: box.__dict__,
    lambda box: box[0],
    lambda box: abs(box - 1.0),
    lambda box: math.isclose(box, 1.0),
    lambda box: f"{box}" + str(box),
    lambda box: repr([box]),
    lambda box: copy.copy(box),
    lambda box: copy.deepcopy([box]),
    lambda box: json.dumps(box, default=lambda it: it.__dict__),
    lambda box: type("Sub", (box,), {}),
    lambda box: box.twice(lambda: 1),
    lambda box: setattr(box, "value", object()),
]


@pytest.mark.parametrize("use", USES)
def test_an_object_has_methods_and_attributes_and_nothing_else(use):
    client = ask({"make": Box})
    box = client.name("make")(3)
    assert box.value == 3 and box.twice() == 6 and box.me().me().value == 3
    box.value = [4]
    assert box.twice() == [4, 4]
    with pytest.raises(Refused):
        use(box)
    assert client.refused


def test_every_special_method_is_refused():
    client = ask({"make": Box})
    for name in REFUSED:
        with pytest.raises(Refused):
            getattr(Remote, name)(client.name("make"))


def raising(error):
    def call():
        raise error

    return call


def test_exceptions_have_a_name_and_a_text():
    own, below = type("Own", (KeyError,), {}), type("ValueError", (Exception,), {"__module__": "builtins"})
    names = {"key": KeyError("k"), "file": FileNotFoundError(2, "x"), "own": own("secret"), "named": below("b")}
    client = ask({**{name: raising(error) for name, error in names.items()}, "Own": own})
    with pytest.raises(KeyError, match="^'k'$"):
        client.name("key")()
    with pytest.raises(FileNotFoundError, match="x"):
        client.name("file")()
    with pytest.raises(client.name("Own")) as caught:
        client.name("own")()
    assert isinstance(caught.value, KeyError)
    for use in (str, repr, bool, lambda it: it.args, lambda it: it == it, client.name("Own")):
        with pytest.raises(Refused):
            use(caught.value)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its class is the question
        client.name("named")()
    assert type(caught.value) is Exception


@pytest.mark.parametrize(
    "error",
    [StopIteration(3), StopAsyncIteration(), GeneratorExit(), SystemExit(0), KeyboardInterrupt(), BaseException()],
)
def test_what_ends_loops_or_processes_is_a_failure(error):
    client = ask({"f": raising(error)})
    with pytest.raises(Refused):
        [client.name("f")() for _ in [1]]
    assert client.refused


def test_a_name_is_what_it_was_first():
    names = {"f": lambda: names.update(f=lambda: 2)}
    client = ask(names)
    first = client.name("f")
    first()
    assert client.name("f") is first
    with pytest.raises(Refused, match="has no g"):
        client.name("g")


def test_answers_that_are_none_are_the_programs_failure():
    """Whatever comes back, a call returns a plain value, or raises a builtin exception or what no test can expect."""
    dice = random.Random(0)
    atoms = ["=", "?", "!", "l", "d", "s", "o", "builtins:KeyError", "builtins:print", "os:error", "KeyError", ""]
    atoms += [0, 1, -1, 1e308, None, True, "x" * 50, [], ["l"], [0, ["l"]], [[0, ["l", 1]]]]

    def noise(depth):
        if depth == 0 or dice.random() < 0.3:
            return dice.choice(atoms)
        return [noise(depth - 1) for _ in range(dice.randrange(5))]

    for _ in range(1000):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            message = noise(4) if dice.random() < 0.3 else [dice.choice(atoms[:3]), noise(3), noise(3)]
            link, client = Link(theirs.fileno(), MOST), Client(Link(ours.fileno(), MOST))
            link.send(["=", ["o", 0], []])
            link.send(message)
            try:
                client.name("f")([1], {2: 3})
            except (Refused, Exception) as error:  # noqa: BLE001 - which one is the question
                assert isinstance(error, Refused) or type(error).__module__ == "builtins", error
                assert bool(client.gone or client.refused) == isinstance(error, Refused)


# -- what needs more, by the text of the tests ----------------------------------------------------------------------

BEYOND = [
    "from solution import f\n@f\ndef g(x): return x\nassert g(1) == 1",
    "from solution import Base\nclass Own(Base): pass\nassert Own().f() == 1",
    "assert (Vector(1) + Vector(2)).x == 3",
    "v = Vector(1)\nassert (v * 3).x == 3",
    "s = Bag([1])\nassert 1 in s",
    "assert Version(1) < Version(2)",
    "with Timer() as t:\n    assert t.x == 1",
    "def test_f(tmp_path): assert f(tmp_path) == 1",
    "import threading\nassert f(1) == 2",
    "from unittest.mock import patch\nassert f(1) == 2",
    "import sys\nsys.stdin = None\nassert f(1) == 2",
    "import time\ntime.sleep = None\nassert f(1) == 2",
    "assert eval('f(1)') == 2",
    "try:\n    from solution import f\nexcept ImportError:\n    f = None\nassert f(1) == 2",
    "assert math.isclose(f(1), 2)",
]


@pytest.mark.parametrize("source", BEYOND)
def test_what_reaches_beyond_values_is_found_in_the_text(source):
    assert Survey(source).reason


@pytest.mark.parametrize(
    "source",
    [
        "def check(candidate):\n    assert candidate([1]) == [2]\ncheck(f)",
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.s = Stack()\n"
        "    def test_f(self):\n        self.s.push(1)\n        self.assertEqual(self.s.pop(), 1)",
        "import pytest\n@pytest.mark.parametrize('a', [1])\ndef test_f(a):\n"
        "    with pytest.raises((KeyError, ValueError)): f(a)",
        "assert type(f(1)) is int and type(f(2)) in (list, tuple)",
        "class Own(Exception): pass\ntry:\n    f(1)\nexcept (Own, ValueError):\n    pass\nassert f(2) is None",
        "x = [2, 1]\nassert f(x) is None and x == [1, 2]",
        "head = Node(1, Node(2))\nassert rev(head).val == 2 and head.next is None",
        "assert Extract([[1]]) == [1]",
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


@pytest.mark.parametrize(
    "test",
    [
        "class Node:\n    x = 1\nn = Node()\nassert f(n) == 1",
        "x = range(3)\nassert f(x) == 1",
    ],
)
def test_what_tests_give_and_is_not_plain_is_unsupported(sandbox, test):
    assert sandbox.check("def f(*x): return 1", [test], limits=TIGHT).unsupported


FAULTY = {
    "nothing asked": "x = 1\nassert x == 1",
    "nothing but its own": "def g(x): return x\nassert g(1) == 1",
    "nothing checked": "print(f(1) == 1)",
    "never called": "def check(candidate):\n    assert candidate(1) == 2",
    "another class": "class Checks:\n    def test_f(self): assert f(1) == 2",
    "fails by itself": "import math\nmath.no_such_function(1)\nassert f(1) == 1",
    "a missing module": "import numpy\nassert f(1) == 1",
    "an unknown fixture": "def test_f(no_such_fixture): assert f(1) == 2",
    "endless": "while True: pass",
}


@pytest.mark.parametrize("name", FAULTY)
def test_what_the_code_has_no_part_in_is_the_tests_fault(sandbox, name):
    with pytest.raises(RuntimeError):
        sandbox.check("def f(x): return x", [FAULTY[name]], limits=TIGHT)


SAYS = """
import os, struct, time
def say(text):
    data = struct.pack('<Q', len(text)) + text.encode()
    while data: data = data[os.write(5, data):]
"""
FORGED = {
    "endless names": "say('[\"ready\",[' + ','.join(f'[\"E{n}\",[\"builtins:KeyError\"]]' for n in range(300_000)) + ']]')",
    "endless hashing": "say('[\"ready\",[]]')\n"
    "say('[\"=\",[\"s\",' + ','.join(str((2**61 - 1) * n) for n in range(60_000)) + '],[]]')",
}


@pytest.mark.parametrize("name", FORGED)
def test_no_program_makes_its_fault_that_of_the_tests(sandbox, name):
    """It speaks in the place of what serves it, and the process of the tests dies before it has asked anything."""
    result = sandbox.check(f"{SAYS}{FORGED[name]}\ntime.sleep(99)", ["assert f(1) == 2"], limits=TIGHT)
    assert result.passed == (False,) and "caused by the code" in result.detail


def test_the_limit_of_a_message_can_be_set(sandbox):
    code, test = "def f(n): return 'x' * n", "assert len(f(3 << 20)) == 3 << 20"
    assert sandbox.check(code, [test], limits=TIGHT).passed == (True,)
    assert sandbox.check(code, [test], limits=replace(TIGHT, message_bytes=2 << 20)).passed == (False,)


@pytest.mark.mounts
def test_each_test_is_judged_apart(sandbox):
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
