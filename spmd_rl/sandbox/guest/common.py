"""Names that programs, answers to function calls and tests use without importing them, as LiveCodeBench allows.

Tests get only modules and the names of types: a function that an answer was to write must not exist already.
"""

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


WORD = re.compile(r"\w+")


def common(source, functions=False):
    """Return the objects that `source` mentions, by name; with `functions`, functions of modules too."""
    words = set(WORD.findall(source))
    found = {}
    for module, names in NAMES.items():
        if functions or module == "typing":
            found.update((name, _get(module, name)) for name in names.split() if name in words)
    found.update((name, importlib.import_module(name)) for name in MODULES.split() if name in words - set(found))
    return found


def _get(module, name):
    return getattr(importlib.import_module(module), name, None)


def execute(job, name, shared=False):
    """Execute the code as a module and return its names. `shared`: its builtins are those of all modules."""
    module = sys.modules[name] = types.ModuleType(name)
    namespace = vars(module)
    # beside the builtins, so that what the code imports itself is its own
    known = common(job["code"], functions=True) if job["lends"] else {}
    namespace.update(known if shared else {"__builtins__": {**known, **vars(builtins)}})
    exec(compile(job["prelude"], "<prelude>", "exec"), namespace)
    exec(compile(job["code"], "<code>", "exec"), namespace)
    return namespace
