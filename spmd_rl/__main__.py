"""Lists the pipelines and tools, or runs one of them: `python -m spmd_rl doctor`, as `spmd-rl doctor` does."""

import ast
import os
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

from spmd_rl.base.command_line import program
from spmd_rl.base.errors import tell
from spmd_rl.bundled import HOME

PIPELINES = {
    name: name for name in ("rlvr", "agentic", "distill", "sft", "dpo", "reward_model", "reward_fl", "evaluate")
}
LOOKS = {"plan": "tools.plan", "dry_run": "tools.dry_run"}
"""Tools with a pipeline's command line: `plan rlvr key=value` is `rlvr --plan key=value`."""
OTHERS = ("doctor", "audit", "play", "view", "compare", "bisect", "again", "report", "convert", "pick", "docs")
TOOLS = {
    **LOOKS,
    **{name: f"tools.{name}" for name in OTHERS},
    "sidecar": "sidecar",
    "sidecar_keys": "bundled.launch.sidecar_keys",
    "node": "bundled.launch.node",
    "smollm2": "model.smollm2",
}
MODULES = PIPELINES | TOOLS
"""Modules below `spmd_rl` by pipeline or tool."""


def main() -> int:
    """List pipelines and tools, or run the named one like `python -m`. Return an exit code or exit."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(f"usage: {program('NAME')} [argument ...]; for more: NAME --help")
        for heading, modules in (("pipelines", PIPELINES), ("tools", TOOLS)):
            print(f"\n{heading}:", *(f"  {known:<14}{_about(module)}" for known, module in modules.items()), sep="\n")
        print(
            f"\nOn N ranks: torchrun --nproc-per-node N -m spmd_rl.rlvr. Rewards, environments, recipes, launch: {HOME}"
        )
        return 0
    if name in LOOKS:
        pipeline = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
        if pipeline in ("-h", "--help"):
            print(f"usage: {program(name)} {'|'.join(PIPELINES)} [key=value ...]\n\n{_about(LOOKS[name])}")
            return 0
        if pipeline not in PIPELINES:
            tell(f"error: {name}: {pipeline} is not a pipeline; give one of {', '.join(PIPELINES)}")
            return 2
        sys.argv.insert(1, f"--{name.replace('_', '-')}")
        name = pipeline
    if name not in MODULES:
        near = " or ".join(get_close_matches(name, MODULES, n=1)) or f"one of {', '.join(MODULES)}"
        tell(f"error: {name}: no such pipeline or tool; did you mean {near}?")
        return 2
    if not sys.flags.safe_path:
        # For a script, Python puts the script's folder there instead.
        sys.path[0] = os.getcwd()
    runpy.run_module(f"spmd_rl.{MODULES[name]}", run_name="__main__", alter_sys=True)
    return 0


def _about(module: str) -> str:
    first, *rest = module.split(".")
    path = (HOME if first == "bundled" else Path(__file__).with_name(first)).joinpath(*rest)
    files = path / "__main__.py", path / "__init__.py", path.with_suffix(".py")
    file = next(file for file in files if file.is_file())
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
