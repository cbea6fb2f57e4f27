"""The execution of a program with standard input and output, as under `python solution.py`."""

import atexit
import builtins
import functools
import gc
import io
import linecache
import os
import resource
import sys
import threading
import traceback
import types

from spmd_rl.sandbox.guest.common import common

NAME = "solution.py"
STREAMS = {f"/dev/{name}": i for i, name in enumerate(("stdin", "stdout", "stderr"))}
STREAMS.update((f"{folder}/{i}", i) for folder in ("/dev/fd", "/proc/self/fd") for i in range(3))
"""Descriptors by Linux's file names; a sandbox has no `/proc`."""


def run(job):
    """Execute the job's code as `__main__`, then end the process as an interpreter would."""
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    path, source = os.path.join(os.getcwd(), NAME), job["code"]
    sys.argv[:], sys.orig_argv = [NAME], ["python3", NAME]
    sys.path.insert(0, os.path.dirname(path))
    linecache.cache[path] = len(source), None, source.splitlines(True), path
    _sources[path] = source
    builtins.open = io.open = _open
    os.open = _os_open
    threading.stack_size = _stack_size
    namespace = vars(module)
    namespace.update(common(source))
    namespace.update(__file__=path, __builtins__=builtins)
    os._exit(_finish(_execute(source, path, namespace), namespace))


# Replacements of functions are made before the fork, which is cheaper.
_sources, _asked = {}, [0]
_real_open, _real_os_open, _real_stack_size = io.open, os.open, threading.stack_size


@functools.wraps(_real_open)
def _open(file, mode="r", *args, **kwargs):
    name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else None
    if name in _sources and not os.path.exists(name):
        return io.BytesIO(_sources[name].encode()) if "b" in mode else io.StringIO(_sources[name])
    if name in STREAMS and not os.path.exists(name):
        file = os.dup(STREAMS[name])
    return _real_open(file, mode, *args, **kwargs)


@functools.wraps(_real_os_open)
def _os_open(path, flags, *args, **kwargs):
    if path in STREAMS and not os.path.exists(path):
        return os.dup(STREAMS[path])
    return _real_os_open(path, flags, *args, **kwargs)


@functools.wraps(_real_stack_size)
def _stack_size(size=0):
    # programs ask for stacks of 512 MB, which the limit of the address space would refuse
    half, before = resource.getrlimit(resource.RLIMIT_AS)[0] // 2, _asked[0]
    _real_stack_size(min(size, half // 4096 * 4096) if half > 0 else size)
    _asked[0] = size
    return before


def _execute(source, path, namespace):
    try:
        exec(compile(source, path, "exec", dont_inherit=True), namespace)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - untrusted code
        _report(error)
        return 1
    return 0


def _report(error):
    # without the frame of `_execute`
    error.__traceback__ = error.__traceback__.tb_next
    try:
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(type(error), error, error.__traceback__)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # noqa: BLE001 - untrusted code
        return


def _finish(status, namespace):
    for step in (threading._shutdown, atexit._run_exitfuncs):
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - untrusted code
            _report(error)
    status = _flush((sys.stdout, sys.stderr), status)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    for name in [name for name in namespace if name != "__builtins__"]:
        namespace[name] = None
    _flush(_writers(), 0)
    _flush((sys.stdout, sys.stderr), 0)
    return status


def _writers():
    kinds = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair
    # `isinstance` would call methods of the program
    found = [stream for stream in gc.get_objects() if issubclass(type(stream), kinds)]
    # text streams write to binary ones
    return sorted(found, key=lambda stream: not issubclass(type(stream), io.TextIOWrapper))


def _flush(streams, status):
    # An interpreter ends with 120 if it cannot flush.
    for stream in streams:
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException:  # noqa: BLE001 - untrusted code
            status = status or 120
    return status
