"""Counter seeds: the same everywhere and for good."""

import subprocess
import sys

import pytest

from spmd_rl.data.seeds import counter_seed

GOLDEN = {
    (): 13020603013274838756,
    (0,): 8988028152271060559,
    (-1, 2**70): 1799728969175004226,
    ("train", 3): 17541794810837901668,
    (0, "train", 1, "9f", 2, 0, 17): 1084700002550443,
    ("\u00e9",): 17150014159602239574,
}


def test_golden_values() -> None:
    # A change here changes every run's data order and sampling noise, and breaks every resume.
    for parts, seed in GOLDEN.items():
        assert counter_seed(*parts) == seed, parts


def test_no_two_lists_of_parts_share_an_encoding() -> None:
    lists = [(), (1,), ("1",), (1, 1), (11,), ("ab", "c"), ("a", "bc"), ("abc",), ("i1:1,",), (1, "i1:1,"), ("",)]
    assert len({counter_seed(*parts) for parts in lists}) == len(lists)


def test_does_not_depend_on_the_hash_salt() -> None:
    code = "from spmd_rl.data.seeds import counter_seed; print(counter_seed('train', 3))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == counter_seed("train", 3)


@pytest.mark.parametrize("part", [True, 1.0, None, b"x"])
def test_other_types_are_a_bug(part: object) -> None:
    with pytest.raises(AssertionError):
        counter_seed(part)
