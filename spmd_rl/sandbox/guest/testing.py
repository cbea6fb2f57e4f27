"""The execution of tests in a process without untrusted code.

A source is a script, a file of pytest or one of `unittest`. A name that it imports `from solution`, or that neither it
nor Python defines, is the program's; `remote.Client` asks for it.
"""

import json
import signal
import sys
import types

from spmd_rl.sandbox.guest import suite
from spmd_rl.sandbox.guest.common import execute
from spmd_rl.sandbox.guest.link import Link
from spmd_rl.sandbox.guest.remote import Client, Remote
from spmd_rl.sandbox.guest.survey import BadTests, Survey

CHECKS = "assert", "fail", "raise", "return False"
"""A source without any of these words checks nothing."""


def test(job, rpc):
    """Test the program at the other end of `rpc`, or in this process, and return a report as JSON.

    It has `error`, a mistake of the tests; `unsupported`, why they need more than plain values; and `sources`, results
    of `Tester.judge`.
    """
    sys.stdin = None
    found = {"error": "", "unsupported": "", "sources": []}
    try:
        base = {}
        try:
            exec(compile(job["prelude"], "<prelude>", "exec"), base)
        except Exception as error:  # noqa: BLE001 - the tests' own text
            raise BadTests(f"the prelude fails: {type(error).__name__}: {error}") from None
        surveys = [Survey(source, frozenset(base), job["entry"]) for source in job["tests"]]
        found["unsupported"] = next((each.reason for each in surveys if each.reason), "") * (job["mode"] == "test")
        if not found["unsupported"]:
            client = Client(Link(rpc, job["message_bytes"]))
            tester = Tester(job, client, base)
            found["sources"] = [tester.judge(survey, source) for survey, source in zip(surveys, job["tests"])]  # noqa: B905
            found["unsupported"] = client.beyond
    except BadTests as error:
        found["error"] = str(error)[:1000]
    return json.dumps(found).encode()


def same(left, right):
    """Return True if two values are equal by `==`, as in LiveCodeBench: an outermost tuple is a list. NaN is NaN."""
    left = list(left) if type(left) is tuple and type(right) is list else left
    return bool(left == right or (left != left and right != right))


def type_of(thing):
    """Return the class of a plain value, like `type`; an object refuses."""
    return type(thing) if type(thing) is not Remote else thing.__class__


class Tester:
    """The runner of sources of tests. `client` asks the program."""

    def __init__(self, job, client, base):
        """Load the program. base: names of the prelude."""
        self._client, self._base, self._beside, self._entry = client, base, None, job["entry"]
        if job["mode"] == "beside":
            try:
                self._beside = execute(job, "solution")
            except BaseException as error:  # noqa: BLE001 - untrusted code
                client.gone = f"{type(error).__name__}: {error}"[:1000]
            return
        client.greet()
        sys.modules["solution"] = solution = types.ModuleType("solution")
        # the module seems to have every name
        solution.__getattr__ = self._name
        signal.signal(signal.SIGXCPU, self._out_of_time)
        self._base = {"type": type_of, **base}

    def judge(self, survey, source):
        """Return each test's outcome, and why the first one failed."""
        client = self._client
        if client.gone:
            return [False], client.gone
        if not any(word in source for word in CHECKS):
            raise BadTests("the tests check nothing")
        client.asked = 0
        outcomes = self._outcomes(survey)
        why = next((f"{name}: {why}" for name, why in outcomes if why), "")
        if not (client.asked or client.refused or self._beside):
            raise BadTests(f"the tests never call the program {why}")
        if not outcomes:
            raise BadTests("there are no tests")
        return [not why for _, why in outcomes], why[:1000]

    def _name(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._client.name(name)

    def _outcomes(self, survey):
        module = sys.modules["tests"] = types.ModuleType("tests")
        namespace = vars(module)
        namespace.update(self._base, __name__="tests" if survey.is_file else "__main__")
        why = self._why(self._lend, survey.lent, namespace) or self._why(exec, survey.code, namespace)
        if why or not survey.is_file:
            return [("test", why)]
        if survey.plain_tests:
            return [(name, self._why(namespace[name])) for name in survey.plain_tests]
        names = {
            name: namespace[name] for name in survey.bound if name in namespace and type(namespace[name]) is not Remote
        }
        return suite.run(names, self._client)

    def _lend(self, names, namespace):
        for name in names:
            if self._beside is None:
                namespace[name] = self._client.name(name)
            elif name in self._beside:
                namespace[name] = self._beside[name]

    def _why(self, call, *args):
        client = self._client
        client.refused = ""
        try:
            found = call(*args)
            return client.refused or client.gone or ("it returned False" if found is False else "")
        except BaseException as error:  # noqa: BLE001 - a test may raise anything
            return client.refused or suite.text_of(error)

    def _out_of_time(self, *_):
        self._client.gone = "the processor time is used up"
        self._client.refuse(self._client.gone)
