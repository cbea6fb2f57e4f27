"""Agreement of all ranks on settings, package versions and data before the first step.

    agree_on_start(world, cfg, {"data.train": prompts.train})  # [all]

Ranks that differ would train on until two checkpoints do not match. No key may differ by rank.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.base.errors import Disagreement
from spmd_rl.config.algorithm_targets import sources
from spmd_rl.config.keys import flatten, to_dict
from spmd_rl.config.run_identity import package_versions, unused_packages
from spmd_rl.distributed.world import World

NAMED = 3
"""Most differences that an error names"""
FOLLOW = ("run.name", "run.dir")
"""Settings derived from others, which differ as a consequence"""
_encode = msgspec.json.Encoder(order="deterministic").encode


def agree_on_start(world: World, cfg: Any, data: Mapping[str, Sequence[Any]]) -> None:
    """[all] Raise Disagreement on all ranks, naming differing keys, values and ranks; else return.

    data: rows by setting; each has an `id` and can be encoded by msgspec.
    """
    values = agreed_values(cfg)
    rows = {name: [[row.id, _digest(row)] for row in found] for name, found in data.items()}
    # One digest first: settings and rows are gathered only after a mismatch.
    digests = world.gather("start: settings, versions and data", _digest([values, rows]))  # [all]
    if len(set(digests)) == 1:
        return
    # All ranks have seen the same digests, so all come here or none.
    everyone = world.gather("start: values of each rank", values)  # [all]
    keys = sorted({key for theirs in everyone for key in theirs}, key=lambda key: (key in FOLLOW, key))
    odd = [key for key in keys if any(theirs.get(key) != everyone[0].get(key) for theirs in everyone)]
    odd = [key for key in odd if key not in FOLLOW] or odd
    lines = [f"{key}: {_who([theirs.get(key, 'none') for theirs in everyone])}" for key in odd]
    if not lines:
        lines = [_rows(name, theirs) for name, theirs in _gathered(world, rows).items() if theirs[1:] != theirs[:-1]]
    more = f"; and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
    # All ranks have gathered the same values, so all raise the same error.
    raise Disagreement("; ".join(lines[:NAMED]) + more)


def agreed_values(cfg: Any) -> dict[str, Any]:
    """Return what must be equal on all ranks: settings, package versions and digests of sources, by name."""
    settings = dict(flatten(to_dict(cfg)))
    unused = unused_packages(settings)
    versions = {f"package {name}": version for name, version in package_versions().items() if name not in unused}
    return settings | versions | {"source of spmd_rl": _source()} | sources(cfg)


def _source() -> str:
    """Return a digest of this package's files, without those only a wheel bundles."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in root.rglob("*.py") if root / "bundled" not in path.parents):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _who(values: Sequence[Any]) -> str:
    """Return text such as `ranks [1] have 3e-05, the others 2e-05`; the others have the most common value."""
    texts = [str(value) for value in values]
    common = max(texts, key=lambda text: (texts.count(text), -texts.index(text)))
    odd = [text for text in dict.fromkeys(texts) if text != common]
    parts = [f"ranks {[rank for rank, text in enumerate(texts) if text == value]} have {value}" for value in odd]
    return ", ".join([*parts, f"the others {common}"])


def _gathered(world: World, rows: Mapping[str, list[list[str]]]) -> dict[str, list[list[list[str]]]]:
    return {name: world.gather(f"start: {name}", mine) for name, mine in rows.items()}  # [all]


def _rows(name: str, everyone: Sequence[Sequence[Sequence[str]]]) -> str:
    longest = max(map(len, everyone))
    padded = [[*theirs, *[["none", ""]] * (longest - len(theirs))] for theirs in everyone]
    index = next(i for i, column in enumerate(zip(*padded, strict=True)) if any(row != column[0] for row in column))
    column = [theirs[index] for theirs in padded]
    same_id = len({id for id, _ in column}) == 1
    return f"{name}: row {index} differs: " + _who([digest if same_id else id for id, digest in column])


def _digest(value: Any) -> str:
    return hashlib.blake2b(_encode(value), digest_size=16).hexdigest()
