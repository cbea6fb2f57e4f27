"""Token ids of pictures."""

from spmd_rl.types import picture_ids


def test_the_ids_of_a_picture_are_negative_and_differ_from_those_of_another_from_the_first_on():
    a, b = picture_ids(b"a", 64), picture_ids(b"b", 64)
    assert len(a) == 64 and max(a) < 0 and len(set(a)) == 64
    assert not set(a) & set(b)
    assert picture_ids(b"a", 4) == a[:4]
