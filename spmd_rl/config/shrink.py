"""`+shrink=cpu`: a recipe at toy scale, without device, download or server.

`configs/shrink/cpu.yaml` has limits for any recipe: a number is an upper limit, null the default, `*` each domain or
environment. Keys of the command line stay.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.bundled import HOME
from spmd_rl.config.keys import flatten, leaves, to_dict

GROUP = "shrink"
ROWS = {path.stem: path for path in (HOME / "configs" / GROUP / "rows").glob("*.jsonl")}
"""Made rows, by the name of the file or dataset they imitate"""
NEEDS_MODEL = {"url", "model"}

Tree = dict[str, Any]


def shrink(tree: Tree, schema: type, said: Sequence[str]) -> Tree:
    """Apply and remove the limits in the sparse settings `tree`. said: keys of the command line.

    Models become the default one, rewarders that need a model or server `served`, missing sources made rows.
    """
    limits = tree.pop(GROUP)
    served = limits.pop("served")
    settings = {leaf.key: leaf.field for leaf in leaves(schema, tree)}
    if "pictures.steps" in settings:
        raise UserError(f"{GROUP}=cpu: not supported by {schema.pipeline}, only for language models")
    given, defaults = dict(flatten(tree)), dict(flatten(to_dict(schema())))
    free = [key for key in settings if not any(_is_below(key, one) for one in said)]
    for key, limit in _expanded(limits, tree):
        for name in (name for name in free if _is_below(name, key)):
            value = given.get(name, defaults.get(name))
            is_small = isinstance(limit, int | float) and isinstance(value, int | float) and value <= limit
            # A pipeline of single answers has no turns that could be limited.
            if not is_small and not ("agents" in settings[name].metadata and value is None):
                _put(tree, name, limit)
    for name in (name for name in free if name.endswith(".model") and name in given):
        _put(tree, name, schema().policy.model)
    for name, value in flatten(tree):
        if isinstance(value, str):
            _put(tree, name, ",".join(map(_made_rows, value.split(","))))
    for domain, reward in tree.get("reward", {}).items():
        if isinstance(reward, dict) and (reward.get("devices") or NEEDS_MODEL & reward.get("args", {}).keys()):
            tree["reward"][domain] = dict(served)
    return tree


def _is_below(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def _expanded(limits: Mapping[str, Any], tree: Any) -> Iterator[tuple[str, Any]]:
    for name, limit in limits.items():
        for one in [one for one, value in tree.items() if isinstance(value, dict)] if name == "*" else [name]:
            if isinstance(limit, Mapping):
                yield from ((f"{one}.{key}", value) for key, value in _expanded(limit, tree.get(one) or {}))
            else:
                yield one, limit


def _put(tree: Tree, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    if value is None:
        tree.pop(name, None)
    else:
        tree[name] = value


def _made_rows(source: str) -> str:
    made = ROWS.get(source.strip().partition(":")[0].rpartition("/")[2].removesuffix(".jsonl"))
    return str(made) if made and not Path(source.strip()).expanduser().exists() else source
