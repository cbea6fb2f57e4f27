"""Runs tests in a process without untrusted code, and says of each source of them: which passed, or not supported.

A source is a script, a pytest file or one of `unittest`. A name that it does not define is the code's, and so is what
it imports `from solution`; `stubs.Client` asks for it.
"""

import asyncio
import builtins
import dataclasses
import json
import os
import signal
import sys
import time
import types

from spmd_rl.sandbox.guest import suite
from spmd_rl.sandbox.guest.common import MODULES, WORD, common, execute
from spmd_rl.sandbox.guest.link import Link
from spmd_rl.sandbox.guest.remote import Remote, maker_of, record_of, value_of
from spmd_rl.sandbox.guest.stubs import Client, Refused, State
from spmd_rl.sandbox.guest.survey import OWN, SAME, TYPE_OF, BadTests, Survey

ASKED = b"?"
"""Comes before the report once the code has been asked: whatever kills this process then is the code's doing."""
CHECKS = {"raise", "raises", "return"}
"""Words, beside those that begin with `assert` or `fail`, without which a source checks nothing."""


def test(job, report, rpc):
    """Test the code at the other end of `rpc`, or the job's own beside it, and return the report as JSON.

    It holds `error`, what is wrong with the tests, and `sources`: [whether it is supported, whether each test passed,
    why the first failed or why it is not supported, where a test wanted more than plain values].
    """
    sys.stdin = None
    found = {"error": "", "sources": []}
    try:
        surveys = [Survey(source) for source in job["tests"]]
        if job["mode"] == "beside":
            client = Beside(job)
        else:
            client = Client(Link(rpc, job["message_bytes"]), lambda: os.write(report, ASKED) and None)
            client.greet()
        tester = Tester(job, client)
        found["sources"] = [tester.judge(survey) for survey in surveys]
    except BadTests as error:
        found["error"] = str(error)[:1000]
    return json.dumps(found).encode()


def same(left, right):
    """Return whether the code's value is that of a case, as LiveCodeBench has it: by `==`, once an outermost tuple is a
    list. NaN equals NaN."""
    left = list(left) if type(left) is tuple and type(right) is list else left
    return type(left).__name__ != "ndarray" and bool(left == right or (left != left and right != right))


class Beside(State):
    """Stands for a client where the code runs in this process: nothing that it makes of its tests is proven."""

    def __init__(self, job):
        self._names = {}
        try:
            self._names = execute(job, "solution", shared=True)
        except BaseException as error:  # noqa: BLE001 - untrusted code
            self.gone = f"{type(error).__name__}: {error}"[:1000]

    def named(self, names):
        """Return what the code has under these names, by name."""
        return {name: self._names[name] for name in names if name in self._names}


class Tester:
    """Runs sources of tests. `client` asks the code."""

    def __init__(self, job, client):
        """`job`: with the prelude, and the name of the code's that the prelude or a builtin may have too."""
        self._client, self._entry, self._beside = client, job["entry"], type(client) is Beside
        if not self._beside:
            sys.modules["solution"] = solution = types.ModuleType("solution")
            solution.__getattr__ = self._name  # it has every name
            _teach_dataclasses(client)
            _teach_sleep(client.slept)
            signal.signal(signal.SIGXCPU, self._out_of_time)
        source = "\n".join([job["prelude"], *job["tests"]])
        self._base = {**common(source), TYPE_OF: self._type_of, OWN: self._of_own, SAME: self._is_same}
        self._words = set(WORD.findall(job["prelude"]))
        try:
            exec(compile(job["prelude"], "<prelude>", "exec"), self._base)
        except Exception as error:  # noqa: BLE001 - the tests' own text
            raise BadTests(f"the prelude fails: {type(error).__name__}: {error}") from None

    def judge(self, survey):
        """Return of a source what the report has."""
        client = self._client
        if survey.reason and not self._beside:
            return False, [], survey.reason, ""
        if client.gone:
            return True, [False], client.gone, ""
        client.beyond = client.own = ""
        names = {name for name in survey.loaded if not hasattr(builtins, name) and not self._has(name, survey)}
        outcomes = self._outcomes(survey, names | {self._entry})
        if not (client.asked or self._beside):  # a function of the code's may have the name of a builtin
            shared = survey.called - survey.bound - names
            plain = survey.loaded == shared and "assert" in survey.words
            if len(shared) == 1 and (plain or any(why for _, why in outcomes)):
                outcomes = self._outcomes(survey, shared)
        if not (survey.words & CHECKS or any(w.startswith(("assert", "fail")) for w in survey.words | self._words)):
            raise BadTests("the tests check nothing")
        if not (client.asked or client.beyond or self._beside):
            raise BadTests("the tests ask the code nothing" + "".join(f" ({why})" for _, why in outcomes[:1] if why))
        if not outcomes:
            raise BadTests("the tests skip themselves")
        if client.unsupported or (client.own and all(why in ("", client.own) for _, why in outcomes)):
            return False, [], client.unsupported or client.own, ""
        details = [f"{name}: {why}" for name, why in outcomes if why]
        return True, [not why for _, why in outcomes], (details or [""])[0][:1000], client.beyond

    def _name(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[:1].isupper() and not name.isupper()  # which is one object, and is not replaced
        return self._client.name(name, first=is_class or not self._client.asked)  # as an import gets it

    def _has(self, name, survey):
        """Return whether the tests have a name without defining it. A module's name that is called is the code's."""
        return name in self._base and not (name in MODULES.split() and name in survey.called)

    def _outcomes(self, survey, names):
        """Return the name of each test, and why it failed or an empty string. A source without any is one itself."""
        self._client.asked, self._client.refused, self._client.unsupported = 0, "", ""
        module = types.ModuleType("tests")
        namespace = vars(module)
        namespace.update(self._base)
        sys.modules["tests"] = module
        namespace.update(self._client.named(names - {""}))
        namespace["__name__"] = "tests" if survey.is_file_of_tests else "__main__"
        why = self._why(exec, survey.code, namespace)
        asked = self._client.asked
        if not why and survey.plain_tests:
            return [(name, self._why(namespace[name])) for name in survey.plain_tests]
        if not why and survey.is_file_of_tests:
            own = {name: namespace[name] for name in survey.bound if name in namespace}
            own = {name: thing for name, thing in own.items() if type(thing) is not Remote}
            try:
                outcomes = suite.run(own, self._client, _text_of)
            except (ValueError, Refused) as error:
                if not asked:
                    raise BadTests(str(error)) from None
                outcomes = [("pytest", self._client.refused or str(error))]
            if outcomes is not None or not asked:
                return outcomes or []
        return [("test", why)]

    def _why(self, call, *args):
        """Return why a test failed, or an empty string."""
        client = self._client
        client.refused = ""
        try:
            found = call(*args)
            return client.refused or client.gone or ("it returned False" if found is False else "")
        except BaseException as error:  # noqa: BLE001 - a test may fail in any way
            return client.refused or _text_of(error) or client.gone

    def _type_of(self, thing):
        remote = thing.remote_of() if hasattr(type(thing), "remote_of") else thing
        if type(remote) is not Remote:
            return type(thing)
        return self._client.ask("type", remote)

    def _is_same(self, *things):
        if not self._beside:
            one, two = things = [value_of(it) if type(it) is Remote else it for it in things]
            kind, are_two = type(one), type(one) is type(two) and one is not two
            if (are_two and kind in (int, float, str) and one == two) or type(len) in (kind, type(two)):
                self._client.want("the tests ask whether equal texts, numbers or functions are one", always=True)
        return things[0] is things[1]

    def _of_own(self, thing):
        self._client.of_own = thing if type(thing) is Remote else self._client
        return thing

    def _out_of_time(self, *_):
        self._client.gone = "the processor time is used up"
        self._client.refuse(self._client.gone)


def _teach_dataclasses(client):
    """Let functions of `dataclasses` read the records that stand for the code's objects."""

    def taught(real):
        def function(thing, **given):
            if real.__name__ == "replace" and type(thing) is Remote:
                return client.ask("replace", thing, [*given.values()], given)
            return real(_local(thing), **given)

        return function

    for name in ("asdict", "astuple", "fields", "is_dataclass", "replace"):
        setattr(dataclasses, name, taught(getattr(dataclasses, name)))


def _teach_sleep(slept):
    """Have what threads of the code change while the tests sleep arrive here, as in one process."""
    now, later = time.sleep, asyncio.sleep

    def sleep(seconds):
        now(seconds)
        slept()

    async def sleep_later(delay, result=None):
        await later(delay)
        slept()
        return result

    time.sleep, asyncio.sleep = sleep, sleep_later


def _local(thing):
    """Return an object of a dataclass made here in the place of each record in a thing, or that class for a class."""
    if type(thing) is Remote and (maker := maker_of(thing)):
        return dataclasses.make_dataclass("Record", maker.fields)
    if type(thing) is Remote and (record := record_of(thing)):
        return dataclasses.make_dataclass("Record", record[1])(*map(_local, record[2]))
    if type(thing) in (list, tuple):
        return type(thing)(map(_local, thing))
    return {key: _local(value) for key, value in thing.items()} if type(thing) is dict else thing


def _text_of(error):
    try:
        return f"{type(error).__name__}: {error!s}"  # `format` would be asked of the code
    except (Refused, ValueError, MemoryError, RecursionError) as other:
        return f"{type(error).__name__}: {type(other).__name__}"
