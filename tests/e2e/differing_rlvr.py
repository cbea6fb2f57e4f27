"""The door on ranks that are not alike: rank 1 has what DIFFERS says.

DIFFERS="policy.lr=3e-5" torchrun ... tests/e2e/differing_rlvr.py key=value ...
DIFFERS="package torch=9.9"; DIFFERS="row 17"
"""

import importlib.metadata
import os
import sys

import msgspec

from spmd_rl.config import RlvrConfig, main
from spmd_rl.data import Prompts
from spmd_rl.rlvr import run

DIFFERS = os.environ["DIFFERS"]


def other_row(number: int) -> None:
    """Let `Prompts.load` give another answer to one row."""
    load = Prompts.load

    def loading(*given):
        prompts = load(*given)
        other = msgspec.structs.replace(prompts.train[number], ground_truth="another")
        prompts.train = (*prompts.train[:number], other, *prompts.train[number + 1 :])
        return prompts

    Prompts.load = loading


def other_version(package: str, version: str) -> None:
    """Let one package be of another version."""
    found = importlib.metadata.version
    importlib.metadata.version = lambda name: version if name == package else found(name)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        kind, _, what = DIFFERS.partition(" ")
        if kind == "row":
            other_row(int(what))
        elif kind == "package":
            other_version(*what.split("="))
        else:
            sys.argv.append(DIFFERS)
    main("rlvr", RlvrConfig, run)
