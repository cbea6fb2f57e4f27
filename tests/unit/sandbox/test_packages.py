"""Packages that answers may import: those named and what they need, in each sandbox, and nothing beside them."""

import pytest

from rewards.code import CodeReward, missing_package
from spmd_rl.base.errors import UserError
from spmd_rl.sandbox import open_sandbox
from spmd_rl.sandbox.bwrap import Bubblewrap
from spmd_rl.sandbox.forkserver import ForkServer
from spmd_rl.sandbox.packages import find_packages
from spmd_rl.types import MISSING_PACKAGE, AnswerInfo, Message, Prompt, RunLimits, Verdict
from tests.unit.sandbox.test_hostile import refused

LIMITS = RunLimits(cpu_seconds=20, wall_seconds=60.0, memory_bytes=256 << 20, disk_bytes=4 << 20)
PACKAGES = ["numpy", "mpmath"]
MAKERS = {
    "bwrap": Bubblewrap,
    "forkserver": ForkServer,
    "forkserver-unmounted": lambda packages: ForkServer(mounts=False, packages=packages),
}


@pytest.fixture(scope="module", params=MAKERS)
def packaged(request):
    try:
        made = MAKERS[request.param](packages=find_packages(PACKAGES))
        made.prove(PACKAGES)
    except RuntimeError as error:
        if request.param != "bwrap":
            raise
        pytest.skip(f"bwrap: {error}")
    yield made
    made.close()


def test_programs_have_them_and_their_values_are_plain(packaged) -> None:
    program = "import numpy as np, mpmath\nprint(int((np.ones((9, 9)) @ np.ones((9, 9))).sum()), mpmath.mpf(2) ** 3)"
    assert packaged.run(program, limits=LIMITS).stdout == "729 8.0\n"
    code = "import numpy as np\ndef double(a): return (2 * np.array(a)).tolist()\ndef total(a): return int(np.sum(a))"
    tests = ["assert total([1, 2]) == 3", "assert double([1.0, 1]) == [2.0, 2]"]
    assert packaged.check(code, [*tests, "assert total([1]) == 2"], limits=LIMITS).passed == (True, True, False)
    assert packaged.check(code, ["import numpy\nassert total([1]) == 1"], limits=LIMITS).unsupported


def test_nothing_else_of_what_is_installed_can_be_imported_or_seen(packaged) -> None:
    folder = find_packages(["numpy"])["numpy"].parent
    paths = [str(folder), str(folder / "numpy"), "/packages/msgspec", "/packages/../work", "/root", "/etc/passwd"]
    program = f"""
import importlib
for name in ("msgspec", "zmq", "torch", "yaml", "pip", "_virtualenv", "spmd_rl.types", "rewards.code"):
    attempt(name, lambda: importlib.import_module(name))
for path in {paths!r}:
    attempt(path, lambda: os.listdir(path) if not path.endswith("passwd") else open(path).read())
"""
    refused(packaged, program, 14, LIMITS)
    listed = packaged.run("import os\nprint(sorted(os.listdir('/packages')))", limits=LIMITS).stdout.strip()
    assert listed in ("", "['mpmath', 'numpy', 'numpy.libs']")


def test_they_are_read_only_and_give_no_way_out(packaged) -> None:
    program = """
import numpy, os, socket
folder = os.path.dirname(numpy.__file__ or "/packages/numpy")
attempt("write", lambda: open(folder + "/__init__.py", "a"))
attempt("create", lambda: open(folder + "/mine.py", "w"))
attempt("remove", lambda: os.remove(folder + "/version.py"))
attempt("chmod", lambda: os.chmod(folder, 0o777))
attempt("memmap", lambda: numpy.memmap("/etc/passwd", mode="r"))
attempt("fromfile", lambda: numpy.fromfile("/etc/shadow", dtype="u1"))
attempt("load", lambda: numpy.ctypeslib.load_library("libevil", "/tmp"))
attempt("socket", lambda: socket.socket())
"""
    refused(packaged, program, 8, LIMITS)
    changed = "import numpy\nnumpy.ones = None\nnumpy.core = None\nprint(numpy.ones)"
    assert packaged.run(changed, limits=LIMITS).stdout == "None\n"
    assert packaged.run("import numpy\nprint(numpy.ones(2).sum())", limits=LIMITS).stdout == "2.0\n"


def test_their_memory_is_bounded(packaged) -> None:
    bomb = "import numpy\ntry:\n    a = numpy.ones(1 << 28)\nexcept MemoryError:\n    print('stopped')"
    assert packaged.run(bomb, limits=LIMITS).stdout == "stopped\n"


def test_only_the_files_of_a_distribution_are_found() -> None:
    assert {name for name in find_packages(["mpmath"]) if "/" not in name} == {"mpmath"}
    found = set(find_packages(["sympy"]))
    assert {"sympy", "mpmath"} <= found and not found & {"numpy", "msgspec", "torch"}
    with pytest.raises(UserError, match=r"reward.code.packages: package nowhere_at_all is not installed here"):
        open_sandbox("auto", "reward.code.sandbox", ["nowhere_at_all"])


# -- without them -----------------------------------------------------------------------------------------------------


def judged(sandbox, code: str, extra: dict) -> Verdict:
    prompt = Prompt("0" * 32, (Message("user", "?"),), "code", "", extra)
    return CodeReward(sandbox).score(prompt, f"```python\n{code}\n```", AnswerInfo(1, "stop"))


@pytest.mark.judge
@pytest.mark.parametrize(
    ("code", "package"),
    [
        ("import nowhere_at_all", "nowhere_at_all"),
        ("from nowhere_at_all.deep import thing", "nowhere_at_all"),
        ("def f(x):\n    import nowhere_at_all\n    return x", "nowhere_at_all"),
        ("import string.nothing", ""),
        ("def f(x): return x + 1", ""),
        ("def f(x): raise ValueError('No module named numpy')", ""),
    ],
)
def test_an_answer_that_wants_a_package_is_told_apart_from_a_wrong_one(sandbox, code: str, package: str) -> None:
    verdict = judged(sandbox, code, {"test_cases": ["assert f(1) == 1"], "case_type": "assert"})
    parts = {"passed": 0.0} | ({MISSING_PACKAGE: 1.0} if package else {})
    assert verdict == Verdict("ok", 0.0, parts, package)


@pytest.mark.judge
def test_a_program_that_wants_a_package_is_told_apart_too(sandbox) -> None:
    extra = {"test_cases": [{"input": "1", "output": "1"}]}
    assert judged(sandbox, "import nowhere_at_all", extra).detail == "nowhere_at_all"
    assert judged(sandbox, "print(1)", extra) == Verdict("ok", 1.0, {"passed": 1.0})


def test_a_missing_module_of_the_standard_library_is_no_package() -> None:
    assert missing_package("ModuleNotFoundError: No module named 'tkinter'") == ""
