"""Execution of a program as a module, and the names that LiveCodeBench imports for programs."""

import builtins
import importlib
import re
import sys
import types

MODULES = """
bisect collections copy datetime decimal fractions functools heapq itertools json math operator os random re statistics
string sys time
"""
NAMES = {
    "typing": "Any Callable Dict FrozenSet Generator Iterable Iterator List Optional Sequence Set Tuple Type Union",
    "bisect": "bisect bisect_left bisect_right insort",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "functools": "cache cmp_to_key lru_cache reduce",
    "heapq": "heapify heappop heappush heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations groupby permutations product",
    "math": "ceil comb factorial floor gcd inf isqrt log sqrt",
}


def common(source):
    """Return the lent names that a program mentions."""
    words = set(re.findall(r"\w+", source))
    found = {name: importlib.import_module(name) for name in MODULES.split() if name in words}
    for module, names in NAMES.items():
        for name in words.intersection(names.split()):
            # Python 3.8 has no `cache`
            found[name] = getattr(importlib.import_module(module), name, None)
    return found


def execute(job, name):
    """Execute a job's program as a module and return its names."""
    module = sys.modules[name] = types.ModuleType(name)
    namespace = vars(module)
    if job["lends"]:
        # among the builtins, so that an import of the program comes first
        namespace["__builtins__"] = {**common(job["code"]), **vars(builtins)}
    exec(compile(job["prelude"], "<prelude>", "exec"), namespace)
    exec(compile(job["code"], "<code>", "exec"), namespace)
    return namespace
