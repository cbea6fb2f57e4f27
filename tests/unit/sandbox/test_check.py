"""Answers that attack their checker: none passes a test that it does not solve, and honest ones of every shape do."""

from dataclasses import replace

import pytest

from tests.unit.sandbox.conftest import TIGHT

pytest.importorskip("spmd_rl.sandbox.exam")  # half of these need it
pytestmark = pytest.mark.judge

ADD = ["assert add(2, 3) == 5", "from solution import add\ndef test_add():\n    assert add(20, 22) == 42"]

CHEATS = {
    "equal to everything": """
class Any:
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __instancecheck__ = lambda *_: True
    __hash__ = None
def add(a, b): return Any()
""",
    "equal to everything, and a number": """
class Any(int):
    __eq__ = lambda *_: True
    __hash__ = None
def add(a, b): return Any(0)
""",
    "a class in place of the function": """
class add:
    def __init__(self, a, b): pass
    def __eq__(self, other): return True
""",
    "an instance in place of the function": """
class Add:
    def __call__(self, a, b): return self
    def __eq__(self, other): return True
    def __getattr__(self, name): return self
add = Add()
""",
    "patched builtins": """
import builtins
builtins.AssertionError = None
builtins.isinstance = builtins.all = builtins.any = builtins.bool = lambda *_: True
builtins.exec = builtins.eval = builtins.compile = lambda *_, **__: None
def add(a, b): return None
""",
    "patched modules": """
import sys, json, os, operator
for module in list(sys.modules.values()):
    for name in ("run_tests", "same", "_why", "answer", "_each"):
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: "")
def add(a, b): return None
""",
    "says that all passed": """
import sys
for stream in (sys.stdout, sys.stderr):
    stream.write('{"passed": [true, true], "detail": "", "error": ""}\\nall tests passed\\n')
    stream.flush()
def add(a, b): return None
""",
    "writes a report to every descriptor": """
import os
for fd in range(64):
    try: os.write(fd, b'r{"passed": [true, true], "detail": "", "error": ""}')
    except OSError: pass
def add(a, b): return None
""",
    "leaves while it is loaded": "import os\nos._exit(0)",
    "leaves politely": "raise SystemExit(0)",
    "leaves when called": "import os\ndef add(a, b): os._exit(0)",
    "leaves when called, politely": "def add(a, b): raise SystemExit(0)",
    "exit hooks": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return None",
    "a thread that answers first": """
import json, os, struct, threading, time
body = json.dumps(["=", True, {}]).encode()
def flood():
    while True:
        for fd in range(3, 64):
            try: os.write(fd, struct.pack("<I", len(body)) + body)
            except OSError: pass
        time.sleep(0.001)
threading.Thread(target=flood, daemon=True).start()
def add(a, b): return None
""",
    "a link that lies about its names": """
import json, os, struct
names = {name: ["object", ["type", "object"]] for name in ("add", "check", "exec", "AssertionError", "__builtins__")}
body = json.dumps(["names", names]).encode()
for fd in range(3, 64):
    try: os.write(fd, struct.pack("<I", len(body)) + body)
    except OSError: pass
""",
    "garbage on the link": """
import os
for fd in range(3, 64):
    try: os.write(fd, os.urandom(100))
    except OSError: pass
def add(a, b): return None
""",
    "a frame without end": """
import os, struct
for fd in range(3, 64):
    try: os.write(fd, struct.pack("<I", 0xFFFFFFFF) + bytes(100))
    except OSError: pass
""",
    "asks the tests to do it": """
import json, os, struct
for number in range(-3, 5):
    for verb in ("call", "get", "set", "op"):
        body = json.dumps(["?", number, verb, [["list", []], ["dict", []]]]).encode()
        for fd in range(3, 64):
            try: os.write(fd, struct.pack("<I", len(body)) + body)
            except OSError: pass
def add(a, b): return None
""",
    "searches its process for the answer": """
import gc, sys
def add(a, b):
    needle = bytes.fromhex("617373657274206164642832302c20323229").decode()  # the test, which stands not here
    frame = sys._getframe().f_back
    while frame:
        if any(needle in repr(value) for value in frame.f_locals.values()):
            return 42
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (list, tuple)) and len(thing) < 100 and needle in repr(thing):
            return 42
    return None
""",
    "arithmetic that gives nothing": """
class Zero:
    __sub__ = __rsub__ = __add__ = __abs__ = __mul__ = lambda *_: 0
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = lambda *_: True
    __float__ = lambda _: 0.0
def add(a, b): return Zero()
""",
    "does not compile": "def add(a, b) return",
    "a null byte": "def add(a, b): return 5\0",
    "deep": "def add(a, b): return " + "(" * 5000 + "1" + ")" * 5000,
    "defines nothing": "x = 1",
    "an endless import": "while True: pass",
    "an endless call": "def add(a, b):\n    while True: pass",
    "an endless flood": "def add(a, b):\n    while True: print('x' * 65536)",
    "a huge value": "def add(a, b): return [[]] * 10**8",
    "a value without end": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "a huge number": "def add(a, b): return 10 ** (10 ** 8)",
    "swallows everything": """
import sys
def add(a, b):
    sys.settrace(lambda *_: None)
    return NotImplemented
""",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_passes_nothing(sandbox, name):
    result = sandbox.check(CHEATS[name], ADD, limits=replace(TIGHT, wall_seconds=15.0))
    assert not any(result.passed), result
    assert result.passed or result.end == "wall", result


WEAK = {
    "close": (
        "def f(x):\n    class Z:\n        __sub__ = __rsub__ = __abs__ = lambda *_: 0\n    return Z()",
        "assert abs(f(1) - 3.5) < 1e-6",
    ),
    "contains": ("def f(x):\n    import itertools\n    return itertools.count()", "assert 7 in f(1)"),
    "order": ("def f(x):\n    class Z:\n        __le__ = __lt__ = lambda *_: True\n    return Z()", "assert f(1) < 3"),
    "reflected": (
        "def f(x):\n    class Z:\n        __gt__ = __ge__ = __eq__ = lambda *_: True\n    return Z()",
        "assert 3 < f(1)",
    ),
    "builtin": ("def f(x): return []\nlen = sum = sorted = lambda *_: 3", "assert len(f(1)) == 3"),
    "named as a builtin": ("x = 1", "assert sum(1, 2) == 3"),
    "list": (
        "def f(x):\n    class L(list):\n        __eq__ = lambda *_: True\n    return L()",
        "assert f(1) == [1, 2]",
    ),
    "text": (
        "class S(str):\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\ndef f(x): return S()",
        "assert f(1) in ('a', 'b')",
    ),
    "inside": (
        "def f(x):\n    class Z:\n        __eq__ = lambda *_: True\n    return [Z(), Z()]",
        "assert f(1) == [1, 2]",
    ),
    "approx": (
        "def f(x):\n    class Z(float):\n        __sub__ = __rsub__ = __eq__ = lambda *_: 0.0\n    return Z()",
        "import pytest\nassert f(1) == pytest.approx(3.5)",
    ),
    "dead": (
        "import os\nos._exit(1)",
        "import pytest\ndef test_it():\n    with pytest.raises(Exception):\n        f(1)",
    ),
    "dead, bare": ("import os\nos._exit(1)", "try:\n    f(1)\nexcept:\n    pass"),
    "dead in the middle": (
        "import os\ndef f(x):\n    os._exit(0)",
        "import pytest\ndef test_it():\n    with pytest.raises(Exception):\n        f(1)",
    ),
    "helper of the prelude": ("def f(x): return 1\ndef helper(x): return 3.0", "assert helper(f(1)) == 3.0"),
}


@pytest.mark.parametrize("name", WEAK)
def test_tests_that_believe_in_operators_are_not_fooled(sandbox, name):
    code, test = WEAK[name]
    entry = "sum" if name == "named as a builtin" else ""
    result = sandbox.check(code, [test], prelude="def helper(x): return -1.0", entry=entry, limits=TIGHT)
    assert result.passed == (False,), result


HONEST = {
    "plain": ("def add(a, b): return a + b", ADD),
    "types": (
        "from decimal import Decimal\nfrom fractions import Fraction\nimport datetime as d\nfrom collections import *\n"
        "P = namedtuple('P', 'x y')\n"
        "def f(): return [1, (2.5,), {3}, frozenset([4]), {5: 'x', (6,): None}, b'7', bytearray(b'8'), 9j, range(10),\n"
        "    Decimal('1.1'), Fraction(1, 3), d.date(2020, 1, 2), d.datetime(2020, 1, 2, 3),\n"
        "    d.timedelta(1), deque([1]),\n"
        "    Counter('aa'), defaultdict(int, a=1), P(1, 2), 10 ** 5000, float('inf'), True, int]",
        [
            "from decimal import Decimal\nfrom fractions import Fraction\n"
            "import datetime as d\nfrom collections import *\n"
            "assert f() == [1, (2.5,), {3}, frozenset([4]), {5: 'x', (6,): None},\n"
            "    b'7', bytearray(b'8'), 9j, range(10),\n"
            "    Decimal('1.1'), Fraction(1, 3), d.date(2020, 1, 2), d.datetime(2020, 1, 2, 3), d.timedelta(1),\n"
            "    deque([1]), {'a': 2}, {'a': 1}, (1, 2), 10 ** 5000, float('inf'), True, int]\n"
            "assert f()[17].x == 1 and isinstance(f()[0], int) and type(f()[4]) is dict"
        ],
    ),
    "changes its argument": (
        "def sort(xs, d, s):\n    xs.sort(); d['a'] = 1; s.clear()",
        ["xs, d, s = [3, 1], {}, {1}\nassert sort(xs, d, s) is None and xs == [1, 3] and d == {'a': 1} and not s"],
    ),
    "a class": (
        "class Vector:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return Vector(self.x + o.x)\n"
        "    def __mul__(self, k): return Vector(self.x * k)\n    def __eq__(self, o): return self.x == o.x\n"
        "    def __len__(self): return self.x\n    def __contains__(self, x): return x == self.x\n"
        "    def __getitem__(self, i): return [self.x][i]\n    def __repr__(self): return f'V({self.x})'\n"
        "class Sub(Vector): pass",
        [
            "v = Vector(1)\nv.x = 5\nassert v.x == 5 and v + Vector(1) == Vector(6) and (v * 2 + v) * 2 == Vector(30)\n"
            "assert len(v) == 5 and 5 in v and 6 not in v and v[0] == 5 and repr(v) == 'V(5)' and not Vector(0)\n"
            "assert isinstance(Sub(1), Vector) and not isinstance(v, Sub) and v != Vector(3)"
        ],
    ),
    "calls back": (
        "def apply(f, xs): return [f(x) for x in xs]",
        ["assert apply(lambda x: x * 2, [1, 2]) == [2, 4]\nassert apply(str, [1]) == ['1']"],
    ),
    "generators": (
        "def gen(n):\n    for i in range(n): yield i * i",
        ["assert list(gen(4)) == [0, 1, 4, 9] and next(gen(2)) == 0"],
    ),
    "exceptions": (
        "class Bad(ValueError): pass\ndef f(x):\n    if x < 0: raise Bad('negative')\n    return {}[x]",
        [
            "import pytest\nfrom solution import Bad, f\n"
            "def test_bad():\n    with pytest.raises(Bad, match='neg') as e: f(-1)\n"
            "    assert 'negative' in str(e.value)\n"
            "def test_base():\n    with pytest.raises(ValueError): f(-1)\n"
            "def test_key():\n    pytest.raises(KeyError, f, 1)",
        ],
    ),
    "coroutines": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1",
        ["import asyncio\nassert asyncio.run(f(1)) == 2"],
    ),
    "constants and modules": (
        "import math\nLIMIT = 10\nTABLE = {'a': [1]}",
        ["from solution import LIMIT, TABLE\nassert LIMIT == 10 and TABLE['a'] == [1] and math.floor(1.5) == 1"],
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 1\ndef make(): return P(3)",
        ["assert make().x == 3 and make() == P(3) and P().x == 1"],
    ),
    "pytest": (
        "def add(a, b): return a + b",
        [
            "import pytest\nfrom solution import *\n"
            "@pytest.fixture\ndef two(): return 2\n@pytest.fixture\ndef three(two):\n    yield two + 1\n"
            "@pytest.mark.parametrize('a, b, c', [(1, 2, 3), (2, 2, 4)])\ndef test_p(a, b, c): assert add(a, b) == c\n"
            "@pytest.mark.slow\ndef test_f(two, three): assert add(two, three) == 5\n"
            "class TestIt:\n    def setup_method(self): self.x = 1\n    def test_m(self): assert add(self.x, 1) == 2\n"
            "def test_a(): assert add(0.1, 0.2) == pytest.approx(0.3)"
        ],
    ),
    "unittest": (
        "def add(a, b): return a + b",
        [
            "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = 1\n"
            "    def test_a(self): self.assertEqual(add(self.x, 1), 2)"
        ],
    ),
    "unsaid imports": (
        "def f(xs: List[int]) -> Optional[int]: return heapq.nlargest(1, xs)[0] if xs else inf",
        ["assert f([1, 3]) == 3 and f([]) == math.inf"],
    ),
    "prints": ("def f():\n    print('x' * 100000)\n    return 1", ["assert f() == 1"]),
    "main guard": ("def f(): return 1\nif __name__ == '__main__':\n    input()", ["assert f() == 1"]),
    "files": ("def f():\n    import io\n    return io.StringIO('a').read()", ["assert f() == 'a'"]),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_answer_passes(sandbox, name):
    code, tests = HONEST[name]
    result = sandbox.check(code, tests, limits=TIGHT)
    assert result.passed and all(result.passed), result


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


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (["assert f(1) =="], "do not compile"),
        (["import numpy\nassert f(1) == 1"], "need numpy"),
        (["def test_a(no_such): pass"], "fixture no_such"),
        ([], "no tests"),
    ],
)
def test_faulty_tests_are_an_error_not_a_verdict(sandbox, tests, why):
    with pytest.raises(RuntimeError, match=why):
        sandbox.check("def f(x): return x", tests, limits=TIGHT)


def test_tests_without_time_are_no_verdict(sandbox):
    limits = replace(TIGHT, wall_seconds=1.0)
    result = sandbox.check("import time\ndef f(): time.sleep(100)", ["assert f() == 1"], limits=limits)
    assert result.passed == () and result.end == "wall"
