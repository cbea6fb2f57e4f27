"""Runs test functions and classes that are in memory under the real pytest, with its own fixtures and without plug-ins,
files of settings and rewriting of assertions."""

import functools
import importlib
import os
import types

from spmd_rl.sandbox.guest.remote import Remote

PLUGINS = "cacheprovider terminal junitxml pastebin doctest faulthandler stepwise legacypath setuponly setupplan"
PLUGINS += " unraisableexception threadexception warnings"
"""Those of pytest's own that tests do not need."""
OPTIONS = ["--noconftest", "--assert=plain", "--capture=no", "--rootdir=.", "-c", os.devnull]
COROUTINE = 0x80  # the flag of an `async def` (`inspect` takes long to import)


@functools.lru_cache(None)
def prepare():
    """Return pytest's session, ready for tests. In a fork server this is done before the fork: it takes long."""
    pytest, config = importlib.import_module("pytest"), importlib.import_module("_pytest.config")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    settings = config._prepareconfig([*(word for name in PLUGINS.split() for word in ("-p", "no:" + name)), *OPTIONS])
    settings._do_configure()
    settings.option.tbstyle = "no"
    # its descriptor would be another file in a child, which must not be closed at the end
    settings.pluginmanager.get_plugin("logging-plugin").log_file_handler.close()
    session = pytest.Session.from_config(settings)
    settings.hook.pytest_sessionstart(session=session)
    del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
    return session


def run(names, client, told):
    """Run the tests among these names: of each that was not skipped its name and why it failed, or ""; None without.

    `client`: what the tests ask. `told(error)` returns an exception as a text. ValueError, with what is wrong, where
    pytest cannot collect or prepare them, or one has not come to its end.
    """
    session = prepare()
    module = types.ModuleType("tests")
    vars(module).update(names)
    plugin = _plugin(importlib.import_module("pytest"), module, client, told)
    session.config.pluginmanager.register(plugin)
    client.collects = True
    try:
        session.config.hook.pytest_collection(session=session)
        client.collects = False
        if not plugin.wrong:
            session.config.hook.pytest_runtestloop(session=session)
    finally:
        client.collects = False
        session.config.pluginmanager.unregister(plugin)
    if plugin.wrong or len(plugin.outcomes) != len(session.items):
        raise ValueError(plugin.wrong or "a test has not come to its end")
    return list(filter(None, plugin.outcomes)) if session.items else None


def _plugin(pytest, module, client, told):
    """Return the plug-in that has pytest collect a module in memory, and notes how its tests end."""
    in_memory = type("InMemory", (pytest.Module,), {"_getobj": lambda self: module})

    class Plugin:
        def __init__(self):
            self.outcomes, self.wrong, self.why, self.left_out = [], "", "", False
            self.asked = 0, client.asked  # before the test that runs, and before all tests

        def pytest_make_parametrize_id(self, val, argname):
            return argname if type(val) is Remote else None  # nothing is asked of an object of the code's

        def pytest_collection(self, session):
            found = in_memory.from_parent(session, path=session.config.rootpath / "tests.py", name="tests.py")
            session.items = list(session.genitems(found))
            session.testscollected = len(session.items)
            modify = session.config.hook.pytest_collection_modifyitems
            modify(session=session, config=session.config, items=session.items)
            return True

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item):
            marked = item.get_closest_marker("xfail") or getattr(item.obj, "__unittest_expecting_failure__", False)
            self.why, client.refused, self.left_out = "", "", bool(marked)
            self.asked = client.asked, self.asked[1]
            done = yield
            name = item.nodeid.partition("::")[2][:100]
            self.outcomes.append(None if self.left_out else (name, client.refused or self.why))
            return done

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(self, pyfuncitem):
            function = pyfuncitem.obj
            is_coroutine = getattr(getattr(function, "__code__", None), "co_flags", 0) & COROUTINE
            wanted = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
            found = importlib.import_module("asyncio").run(function(**wanted)) if is_coroutine else function(**wanted)
            if found is False:
                raise AssertionError("it returned False")
            return True

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_makereport(self, item, call):
            error = call.excinfo and call.excinfo.value
            if type(error).__name__ == "FixtureLookupError":
                self.wrong = self.wrong or f"the tests need the fixture {error.argname}, which is not here"
            elif type(error).__name__ in ("Skipped", "SkipTest"):
                self.left_out = self.asked == (client.asked, 0)  # whatever the code is
                self.why = self.why or "it was skipped"
            elif error is not None:
                self.why = self.why or told(error)

        def pytest_collectreport(self, report):
            if report.failed:
                self.wrong = f"pytest cannot collect the tests: {str(report.longrepr).strip()[-300:]}"

        def pytest_runtest_logreport(self, report):
            if report.failed:
                self.why = self.why or "a part of it failed"

    return Plugin()
