"""Isolation of SGLang in this process: variables set before its import, state restored after it."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from inspect import isfunction
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spmd_rl.engine.guest import undisturbed

FORCED = {"cpu": {"SGLANG_USE_CPU_ENGINE": "1"}}
"""Variables by device type. Without this one SGLang looks for vLLM's kernels on the CPU"""
# Without it SGLang needs a NUMA node per rank of a replica. Nothing is bound: only `sgl_kernel`, which is not
# installed, reads the value.
DEFAULTS = {"cpu": {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * 64)}}
"""Defaults by device type; a user's value wins"""

NOT_NEEDED = ("torchvision", "sgl_kernel")
"""Packages that SGLang imports but that have no CPU build, or no use there"""


@contextmanager
def hosted(device_type: str) -> Iterator[None]:
    """Import and start SGLang inside; on exit restore the process, except for SGLang's variables and modules."""
    os.environ.update(FORCED.get(device_type, {}))
    for name, value in DEFAULTS.get(device_type, {}).items():
        os.environ.setdefault(name, value)
    logging.getLogger("sglang").setLevel(os.environ.get("SGLANG_LOGGING_LEVEL", "ERROR"))
    cpu = device_type == "cpu"
    with undisturbed("SGLANG_"), _without(NOT_NEEDED if cpu else ()), _plain() if cpu else nullcontext():
        yield


@contextmanager
def _plain() -> Iterator[None]:
    # On the CPU a C++ compiler would take minutes for `torch.compile`. Pinned memory: see `Unpinned`.
    compiler = torch.compile
    torch.compile = lambda function=None, **settings: function or (lambda one: one)
    try:
        with Unpinned():
            yield
    finally:
        torch.compile = compiler


class Unpinned(TorchFunctionMode):
    """Context that ignores requests for pinned memory, which torch refuses without a device."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def unpinned() -> AbstractContextManager[object]:
    """Return a context that ignores requests for pinned memory, if there is no device."""
    return nullcontext() if torch.accelerator.is_available() else Unpinned()


@contextmanager
def _without(packages: tuple[str, ...]) -> Iterator[None]:
    """Let imports of missing packages succeed inside; calling anything in them is an error."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    finder = _Finder(absent)
    if "torchvision" in absent:
        from transformers.utils import is_torchvision_available

        # Called so that transformers remembers that torchvision is missing.
        is_torchvision_available()
    sys.meta_path.insert(0, finder)
    _Absent.importing = True
    try:
        yield
    finally:
        _Absent.importing = False
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
            del sys.modules[name]


class _Finder:
    def __init__(self, packages: list[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _AbsentModule(spec.name)
        # SGLang only checks for a minimum version.
        module.__version__ = "9.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is empty."""


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


class _Absent(type):
    """Metaclass of placeholders for missing names: classes, so that others can inherit."""

    importing = False
    """True during imports, which may use decorators; later calls are errors"""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not _Absent.importing:
            raise NotImplementedError(f"{cls.__name__} is not installed here")
        return args[0] if args and isfunction(args[0]) else _absent(cls.__name__)


def _absent(name: str) -> type:
    return _Absent(name, (), {})
