"""Test functions and classes in memory under the real pytest, without plug-ins, files of settings or rewriting of
assertions.
"""

import functools
import importlib
import os
import types

from spmd_rl.sandbox.guest.remote import Refused, Remote
from spmd_rl.sandbox.guest.survey import BadTests

PLUGINS = "cacheprovider terminal junitxml pastebin doctest faulthandler stepwise legacypath setuponly setupplan"
PLUGINS += " unraisableexception threadexception warnings"
"""Plug-ins of pytest that are switched off."""
OPTIONS = ["--noconftest", "--assert=plain", "--capture=no", "--rootdir=.", "-c", os.devnull]


@functools.lru_cache(None)
def prepare():
    """Return a session of pytest, which the fork server makes before it forks, since it takes long."""
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


def run(names, client):
    """Run the tests among these names; return each one's name and why it failed, or an empty text.

    BadTests if pytest cannot collect or prepare them and the program (`client`) has no part in it.
    """
    session, before = prepare(), client.asked
    module = types.ModuleType("tests")
    vars(module).update(names)
    plugin = _plugin(importlib.import_module("pytest"), module, client)
    session.config.pluginmanager.register(plugin)
    try:
        session.config.hook.pytest_collection(session=session)
        if not plugin.wrong:
            session.config.hook.pytest_runtestloop(session=session)
    except Refused as error:
        return [("pytest", str(error))]
    finally:
        session.config.pluginmanager.unregister(plugin)
    wrong = plugin.wrong or ("a test has not come to its end" if len(plugin.outcomes) != len(session.items) else "")
    if wrong and client.asked == before and not client.refused:
        raise BadTests(wrong)
    return plugin.outcomes + [("pytest", wrong)] * bool(wrong)


def text_of(error):
    """Return an exception as a text."""
    try:
        return f"{type(error).__name__}: {error!s}"
    except (Refused, Exception) as other:  # noqa: BLE001 - a `__str__` of the tests may raise anything
        return f"{type(error).__name__}: {type(other).__name__}"


def _plugin(pytest, module, client):
    in_memory = type("InMemory", (pytest.Module,), {"_getobj": lambda self: module})

    class Plugin:
        def __init__(self):
            self.outcomes, self.wrong, self.why = [], "", ""

        def pytest_make_parametrize_id(self, val, argname):
            return argname if type(val) is Remote else None  # nothing is asked of an object

        def pytest_collection(self, session):
            found = in_memory.from_parent(session, path=session.config.rootpath / "tests.py", name="tests.py")
            session.items = list(session.genitems(found))
            session.testscollected = len(session.items)
            modify = session.config.hook.pytest_collection_modifyitems
            modify(session=session, config=session.config, items=session.items)
            return True

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item):
            self.why = client.refused = ""
            done = yield
            self.outcomes.append((item.nodeid.partition("::")[2][:100], client.refused or self.why))
            return done

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(self, pyfuncitem):
            wanted = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
            if pyfuncitem.obj(**wanted) is False:
                raise AssertionError("it returned False")
            return True

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_makereport(self, item, call):
            error = call.excinfo and call.excinfo.value
            if type(error).__name__ == "FixtureLookupError":
                self.wrong = self.wrong or f"the tests need the fixture {error.argname}, which is not here"
            elif error is not None:
                self.why = self.why or text_of(error)

        def pytest_collectreport(self, report):
            if report.failed:
                self.wrong = f"pytest cannot collect the tests: {str(report.longrepr).strip()[-300:]}"

        def pytest_runtest_logreport(self, report):
            if report.failed:
                self.why = self.why or "a part of it failed"

    return Plugin()
