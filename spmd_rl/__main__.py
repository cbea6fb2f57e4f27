"""Lists the pipelines and tools, or runs one of them: `python -m spmd_rl doctor`, as `spmd-rl doctor` does."""

import ast
import os
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

from spmd_rl.bundled import HOME
from spmd_rl.errors import tell

PIPELINES = ("rlvr", "agentic")
TOOLS = ("doctor", "audit", "play", "view", "compare", "report", "curve", "convert", "simulate", "docs")
MODULES = (
    {name: name for name in PIPELINES}
    | {name: f"tools.{name}" for name in TOOLS}
    | {"sidecar": "sidecar", "sidecar_keys": "bundled.launch.sidecar_keys", "smollm2": "model.smollm2"}
)
"""The pipelines, then the tools: what each runs of `spmd_rl`."""


def main() -> int:
    """List what there is, or run what the command line names as `python -m` would. Returns an exit code or exits."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: python -m spmd_rl NAME [argument ...], or spmd-rl NAME ...; NAME --help says more\n")
        print("\n".join(f"  {name:<16}{_about(module)}" for name, module in MODULES.items()))
        print(
            f"\nOn N ranks: torchrun --nproc-per-node N -m spmd_rl.rlvr. Rewards, environments, recipes, launch: {HOME}"
        )
        return 0
    if name not in MODULES:
        near = " or ".join(get_close_matches(name, MODULES, n=1)) or f"one of {', '.join(MODULES)}"
        tell(f"error: {name}: no pipeline or tool; did you mean {near}?")
        return 2
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # for a script it is the folder of that
    runpy.run_module(f"spmd_rl.{MODULES[name]}", run_name="__main__", alter_sys=True)
    return 0


def _about(module: str) -> str:
    """The first line of a module's docstring, without an import."""
    first, *rest = module.split(".")
    path = (HOME if first == "bundled" else Path(__file__).with_name(first)).joinpath(*rest)
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
