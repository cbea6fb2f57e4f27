"""Programs that read standard input: they find what they find under `python solution.py`, in each sandbox."""

import pytest

from spmd_rl.types import RunLimits

pytestmark = pytest.mark.judge
LIMITS = RunLimits(cpu_seconds=10, wall_seconds=30.0)
READ = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
TEXT = "3 4\n5\n"

PROGRAMS = {
    "argv": ("import sys\nprint(sys.argv, len(sys.argv), *sys.argv[1:])", "['solution.py'] 1\n"),
    "file": ("import os\nprint(os.path.basename(__file__), __name__, __spec__)", "solution.py __main__ None\n"),
    "its own source": ("print(open(__file__).read(), end='')", "print(open(__file__).read(), end='')"),
    "main module": (
        "import sys, pickle\nclass A: x = 1\nm = sys.modules['__main__']\n"
        "print(m.A is A, m.__dict__ is globals(), pickle.loads(pickle.dumps(A())).x)",
        "True True 1\n",
    ),
    "getsource": (
        "import inspect\ndef f():\n    return 5\nprint(inspect.getsource(f), end='')",
        "def f():\n    return 5\n",
    ),
    "fileinput": ("import fileinput\nprint([line.split() for line in fileinput.input()])", "[['3', '4'], ['5']]\n"),
    "open(0)": ("print(open(0).read().split())", "['3', '4', '5']\n"),
    "open(0) by line": ("f = open(0)\nprint(next(f).split(), *f)", "['3', '4'] 5\n\n"),
    "/dev/stdin": ("print(open('/dev/stdin').read().split())", "['3', '4', '5']\n"),
    "Path of stdin": ("import pathlib\nprint(pathlib.Path('/dev/stdin').read_text().split())", "['3', '4', '5']\n"),
    "os.open of stdin": ("import os\nprint(os.read(os.open('/dev/stdin', os.O_RDONLY), 99))", "b'3 4\\n5\\n'\n"),
    "/dev/stdout": ("print('a')\nwith open('/dev/stdout', 'w') as f: f.write('b\\n')", "b\na\n"),
    "os.read": ("import os\nprint(os.read(0, 10**6), os.fstat(0).st_size)", "b'3 4\\n5\\n' 6\n"),
    "buffer": (
        "import sys\nread = sys.stdin.buffer.readline\nprint(read(), read(), read())",
        "b'3 4\\n' b'5\\n' b''\n",
    ),
    "input until the end": (
        "try:\n    while True: print(input('> '))\nexcept EOFError: print('end')",
        "> 3 4\n> 5\n> end\n",
    ),
    "stdin rewrapped": (
        "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer)\nprint(input(), input())",
        "3 4 5\n",
    ),
    "stdin in memory": (
        "import io, os, sys\ninput = io.BytesIO(os.read(0, 99)).readline\nprint(input())",
        "b'3 4\\n'\n",
    ),
    "stdin replaced": ("import io, sys\nsys.stdin = io.StringIO('7\\n')\nprint(input())", "7\n"),
    "stdout rewrapped": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8', line_buffering=True)\n"
        "print('\\u00e9')",
        "\u00e9\n",
    ),
    "stdout detached": ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'utf-8')\nprint(1)", "1\n"),
    "stdout reconfigured": ("import sys\nsys.stdout.reconfigure(line_buffering=True)\nprint(1)", "1\n"),
    "unclosed writer": ("import sys\nout = open(1, 'w', closefd=False)\nout.write('1\\n')", "1\n"),
    "unclosed binary writer": ("import io\nout = io.BufferedWriter(io.FileIO(1, 'w'))\nout.write(b'1\\n')", "1\n"),
    "unclosed fdopen": ("import os\nf = os.fdopen(1, 'w')\nf.write('1\\n')", "1\n"),
    "unclosed writer in a cycle": (
        "class A: pass\na = A()\na.a, a.f = a, open('/dev/stdout', 'w')\na.f.write('1\\n')",
        "1\n",
    ),
    "unclosed writer of a function": (
        "def f(out=open('/dev/stdout', 'w')): out.write('1\\n')\nimport builtins\nbuiltins.kept = f\nf()",
        "1\n",
    ),
    "fast output": (
        "import io, os, sys\nclass Fast(io.IOBase):\n    def __init__(self, file):\n"
        "        self.b = io.BytesIO()\n"
        "    def write(self, s): self.b.write(s.encode())\n    def flush(self):\n"
        "        os.write(1, self.b.getvalue()); self.b.seek(0); self.b.truncate(0)\n"
        "sys.stdout = Fast(sys.stdout)\nprint(1)\nprint(2)",
        "1\n2\n",
    ),
    "os.write": ("import os\nos.write(1, b'1\\n')\nprint(2)", "1\n2\n"),
    "stdout closed": ("import sys\nprint(1)\nsys.stdout.close()", "1\n"),
    "exit hook": ("import atexit\natexit.register(print, 2)\nprint(1)", "1\n2\n"),
    "destructor": ("class A:\n    def __del__(self): print('gone')\na = A()\nprint('end')", "end\ngone\n"),
    "thread at the end": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print(2))).start()\nprint(1)",
        "1\n2\n",
    ),
    "deep recursion in a thread": (
        "import sys, threading\nsys.setrecursionlimit(10**7)\nthreading.stack_size(512 << 20)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(100_000)))\nt.start()\nt.join()\n"
        "print(threading.stack_size() >> 20)",
        "100000\n512\n",
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(20000))",
        "20000\n",
    ),
    "zoneinfo": (
        "from zoneinfo import *\nfrom datetime import *\n"
        "print(datetime(2024, 7, 1, tzinfo=ZoneInfo('Europe/Berlin')).utcoffset(),"
        " ZoneInfo('UTC'), len(available_timezones()) > 300)",
        "2:00:00 UTC True\n",
    ),
    "no such zone": (
        "import zoneinfo\ntry: zoneinfo.ZoneInfo('Europe/Nowhere')\nexcept zoneinfo.ZoneInfoNotFoundError: print(1)",
        "1\n",
    ),
    "asyncio": (
        "import asyncio\nasync def main():\n"
        "    r, w = await asyncio.gather(asyncio.to_thread(input), asyncio.sleep(0, 5))\n"
        "    print(r, w)\nasyncio.run(main())",
        "3 4 5\n",
    ),
    "dataclass and annotations": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport typing\n"
        "@dataclass\nclass P:\n    x: int\n"
        "print(P(1), typing.get_type_hints(P))",
        "P(x=1) {'x': <class 'int'>}\n",
    ),
    "annotations are its own": ("def f(x: int): pass\nprint(f.__annotations__)", "{'x': <class 'int'>}\n"),
    "not text": ("import sys\nsys.stdout.buffer.write(b'\\xff\\n')", "\ufffd\n"),
    "unsaid imports": ("def f(x: List[int]): return math.prod(x)\nprint(f([2, 3]))", "6\n"),
}


@pytest.mark.mounts
def test_a_program_finds_what_it_does_under_python(sandbox):
    found = {name: sandbox.run(code, TEXT, LIMITS) for name, (code, _) in PROGRAMS.items()}
    wrong = {
        name: found[name] for name, (_, out) in PROGRAMS.items() if (found[name].stdout, found[name].code) != (out, 0)
    }
    assert not wrong


ENDS = {
    "import sys; sys.exit(3)": (3, ""),
    "exit()": (0, ""),
    "raise SystemExit('no')": (1, "no\n"),
    "import os; print(1, flush=True); os._exit(7)": (7, ""),
    "import sys\nsys.exit(True)": (1, ""),
    "import sys, threading\nthreading.Thread(target=sys.exit, args=(5,)).start()": (0, ""),
}


@pytest.mark.mounts
@pytest.mark.parametrize("code", ENDS)
def test_exit_codes(sandbox, code):
    result = sandbox.run(code, limits=LIMITS)
    assert (result.code, result.stderr) == ENDS[code] and result.end == "exit", result


@pytest.mark.mounts
def test_a_traceback_names_the_lines_of_the_program(sandbox):
    result = sandbox.run("def f(x):\n    return 1 // x  # here\n\nf(0)", limits=LIMITS)
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith("ZeroDivisionError"), result
    assert lines[1].endswith('solution.py", line 4, in <module>') and "    return 1 // x  # here" in lines, result
    assert "guest" not in result.stderr and "/work" not in result.stderr
    result = sandbox.run("x = (", limits=LIMITS)
    assert result.code == 1 and 'solution.py", line 1' in result.stderr and "    x = (" in result.stderr, result


def test_output_has_a_limit_that_can_be_set(sandbox):
    program = "import sys\nfor _ in range(3): sys.stdout.write('x' * (1 << 20))"
    assert len(sandbox.run(program, limits=LIMITS).stdout) == 3 << 20
    result = sandbox.run(program, limits=RunLimits(output_bytes=1 << 20))
    assert result.end == "output" and len(result.stdout) <= 1 << 20
