"""The page on worlds and adapters: its tables name every setting, and its example plays."""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from types import ModuleType

from envs.adapters.tool_class import ToolClassEnv

DOCS = Path(__file__).resolve().parents[3] / "docs"
TEXT = (DOCS / "ENVIRONMENTS_WORLDS.md").read_text(encoding="utf-8")
SERVICES = {"sandbox", "http"}


def test_the_table_names_every_world_and_setting() -> None:
    rows = re.findall(r"^\| `(envs\.[\w.]+):(\w+)` \|.*\| (.*) \|$", TEXT, re.MULTILINE)
    assert len(rows) == 16
    for module, name, named in rows:
        found = getattr(importlib.import_module(module), name)
        assert re.findall(r"`(\w+)`", named) == [p for p in inspect.signature(found).parameters if p not in SERVICES]
    adapters = {f"envs.adapters.{path.stem}" for path in (DOCS.parent / "envs" / "adapters").glob("*.py")}
    unnamed = {"envs.adapters.__init__", "envs.adapters.global_random"}
    assert adapters - unnamed == {module for module, _, _ in rows if "adapters" in module}


def test_the_class_of_tools_plays(monkeypatch, tmp_path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    module = ModuleType("my_tools")
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_tools", module)
    (tmp_path / "my_rows.jsonl").write_text('{"secret": 4}\n')
    env = ToolClassEnv("my_tools:Guess", str(tmp_path / "my_rows.jsonl"))
    assert env.reset(0)[0] == "I think of a number from 1 to 10."
    guesses = [env.step(json.dumps({"name": "guess", "arguments": {"number": n}})) for n in (3, 4)]
    assert [step[:3] for step in guesses] == [("no", 0.0, False), ("yes", 1.0, True)]
