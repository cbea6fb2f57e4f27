"""SGLang as a guest in our process: what it is given before it is imported, and what it may not change for good.

Left out: the engine itself (`start.py`). Nothing here imports SGLang.
"""

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
"""By type of device. Without it SGLang looks for kernels of vLLM's on the CPU."""
DEFAULTS = {"cpu": {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * 64)}}
"""By type of device; a user's own value wins. Unsaid, SGLang wants a NUMA node for each rank of a replica. `sgl_kernel`
alone reads it, which is not there: nothing is bound."""

NOT_NEEDED = ("torchvision", "sgl_kernel")
"""Packages that SGLang imports whatever it is asked for, and that have no build for the CPU or are not used there."""


@contextmanager
def hosted(device_type: str) -> Iterator[None]:
    """Import and start SGLang inside; afterwards the process is as it was, SGLang's own variables and modules aside."""
    os.environ.update(FORCED.get(device_type, {}))
    for name, value in DEFAULTS.get(device_type, {}).items():
        os.environ.setdefault(name, value)
    logging.getLogger("sglang").setLevel(os.environ.get("SGLANG_LOGGING_LEVEL", "ERROR"))
    cpu = device_type == "cpu"
    with undisturbed("SGLANG_"), _without(NOT_NEEDED if cpu else ()), _plain() if cpu else nullcontext():
        yield


@contextmanager
def _plain() -> Iterator[None]:
    """Let functions that are made inside stay as they are: on the CPU a C++ compiler would work at them for minutes.

    And memory, see `Unpinned`.
    """
    compiler = torch.compile
    torch.compile = lambda function=None, **settings: function or (lambda one: one)
    try:
        with Unpinned():
            yield
    finally:
        torch.compile = compiler


class Unpinned(TorchFunctionMode):
    """Inside, memory that would be pinned for a device's sake is plain: where there is none, torch refuses to pin."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def unpinned() -> AbstractContextManager[object]:
    """`Unpinned` on a machine without a device."""
    return nullcontext() if torch.accelerator.is_available() else Unpinned()


@contextmanager
def _without(packages: tuple[str, ...]) -> Iterator[None]:
    """Let imports of packages that are not installed pass inside; whoever calls something of them gets an error."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    finder = _Finder(absent)
    if "torchvision" in absent:
        from transformers.utils import is_torchvision_available

        is_torchvision_available()  # which remembers that it is not
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
    """Finds a module that has every name, for these packages and all that is in them."""

    def __init__(self, packages: list[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _AbsentModule(spec.name)
        module.__version__ = "9.0"  # what is asked for is whether it is old
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


class _Absent(type):
    """The type of what stands for a name of a package that is not installed: a class, so that others may inherit."""

    importing = False
    """Whether modules are being imported, whose decorators and tables may be made; later calls are errors."""

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
