"""Lists the pipelines and tools, or runs one of them: `python -m spmd_rl doctor`, as `spmd-rl doctor` does."""

import ast
import os
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

from spmd_rl.bundled import HOME

PIPELINES = {name: f"spmd_rl.{name}" for name in ("rlvr", "agentic")}
TOOLS = {name: f"spmd_rl.{name}" for name in ("doctor", "audit", "play", "view", "compare", "simulate", "sidecar")} | {
    "simulate.split": "spmd_rl.simulate.split",
    "report": "spmd_rl.track.report",
    "curve": "spmd_rl.track.curve",
    "convert": "spmd_rl.checkpoint.convert",
    "smollm2": "spmd_rl.model.smollm2",
    "sidecar_keys": "spmd_rl.bundled.launch.sidecar_keys",
}
USAGE = """\
usage: python -m spmd_rl NAME [argument ...], or spmd-rl NAME ...; NAME --help says more
       torchrun --nproc-per-node N -m spmd_rl.rlvr [key=value ...]
"""


def main(argv: list[str]) -> int:
    """List what there is, or run what `argv` names as `python -m` would. Returns the exit code, unless that exits."""
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return 0
    modules = PIPELINES | TOOLS
    if argv[0] not in modules:
        near = get_close_matches(argv[0], modules, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(modules)}"
        print(f"error: {argv[0]}: no pipeline or tool; {hint}", file=sys.stderr)
        return 2
    sys.argv[1:] = argv[1:]
    runpy.run_module(modules[argv[0]], run_name="__main__", alter_sys=True)
    return 0


def listing() -> str:
    """Usage, and the first line of each docstring, for which nothing is imported."""
    parts = [USAGE]
    for title, modules in (("pipelines", PIPELINES), ("tools", TOOLS)):
        parts += [f"{title}:", *(f"  {name:<16}{_about(module)}" for name, module in modules.items()), ""]
    return "\n".join([*parts, f"rewards, environments, recipes, cluster templates: {HOME}"])


def _about(module: str) -> str:
    path = Path(__file__).parents[1].joinpath(*module.split("."))
    if module.startswith("spmd_rl.bundled."):
        path = HOME.joinpath(*module.split(".")[2:])
    file = path / "__main__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def script() -> int:
    """`spmd-rl`: sees the modules of the directory where it is called, as `python -m` does."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
