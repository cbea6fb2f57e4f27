"""Which ranks train and which generate, and how far ahead."""

import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.generation import GenerationSettings
from spmd_rl.config.placement import Placement, ranks_do
from spmd_rl.config.sections.data import RewardsConfig
from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.config.sections.rollout import RolloutConfig
from spmd_rl.placement.colocated import colocated
from spmd_rl.rollout.pace import last_use, oldest_version

RANKS = "ranks such as 0-3 or 0,2,4-7, or a share such as 25%"


def split(num_ranks: int, **settings: str) -> Placement:
    return Placement.of(PlacementConfig(mode="split", **settings), num_ranks)


@pytest.mark.parametrize(
    ("settings", "train", "generate"),
    [
        ({}, (0, 1, 2, 3), (4, 5, 6, 7)),
        ({"train": "0-1"}, (0, 1), (2, 3, 4, 5, 6, 7)),
        ({"generate": "0,2-3"}, (1, 4, 5, 6, 7), (0, 2, 3)),
        ({"train": "4-7", "generate": "0-3"}, (4, 5, 6, 7), (0, 1, 2, 3)),
        ({"train": "25%"}, (0, 1), (2, 3, 4, 5, 6, 7)),
        ({"generate": "12.5%"}, (0, 1, 2, 3, 4, 5, 6), (7,)),
    ],
)
def test_each_rank_has_one_task(settings: dict[str, str], train: tuple[int, ...], generate: tuple[int, ...]) -> None:
    assert split(8, **settings) == Placement(train, generate)


def test_colocated_ranks_do_both() -> None:
    assert Placement.of(PlacementConfig(), 3) == Placement((0, 1, 2), (0, 1, 2))


@pytest.mark.parametrize(
    ("settings", "train", "frozen"),
    [
        ({"reference": "6-7"}, (0, 1, 2, 3, 4, 5), {"reference": (6, 7)}),
        ({"reference": "0", "teacher": "2,4"}, (1, 3, 5, 6, 7), {"reference": (0,), "teacher": (2, 4)}),
        ({"reference": "25%", "teacher": "6-7"}, (0, 1, 2, 3, 4, 5), {"reference": (6, 7), "teacher": (6, 7)}),
    ],
)
def test_frozen_roles_have_ranks_of_their_own(settings: dict, train: tuple[int, ...], frozen: dict) -> None:
    placement = Placement.of(PlacementConfig(**settings), 8)
    assert placement == Placement(train, train, frozen)
    assert [placement.of_role(kind) for kind in ("policy", "reference")] == [train, frozen["reference"]]


def test_a_placement_says_who_holds_what() -> None:
    held = Placement.of(PlacementConfig(reference="3", teacher="4-5"), 6).held
    assert held == "rank 3 holds the reference; ranks 4-5 hold the teacher; "


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"reference": "4"}, "placement.reference: there is no rank 4 among 4 ranks"),
        ({"reference": "0-3"}, "placement.reference: no rank of 4 is left to train"),
        ({"reference": "0-1", "teacher": "2-3"}, "placement.reference and placement.teacher: no rank of 4 is left to "
                                                 "train"),
        ({"teacher": "all"}, f"placement.teacher: must be {RANKS}, not 'all'"),
    ],
)  # fmt: skip
def test_a_mistake_in_ranks_of_frozen_roles_is_one_line(settings: dict[str, str], line: str) -> None:
    with pytest.raises(UserError) as error:
        Placement.of(PlacementConfig(**settings), 4)
    assert str(error.value) == line


def test_frozen_roles_have_ranks_of_their_own_where_other_ranks_generate() -> None:
    assert split(8, reference="6-7") == Placement((0, 1, 2), (3, 4, 5), {"reference": (6, 7)})
    assert split(8, train="0-1", reference="2") == Placement((0, 1), (3, 4, 5, 6, 7), {"reference": (2,)})
    assert split(8, train="50%", teacher="0-3") == Placement((4, 5), (6, 7), {"teacher": (0, 1, 2, 3)})
    lent = Placement.of(PlacementConfig(mode="lent", reference="3"), 4)
    assert lent == Placement((0,), (0, 1, 2), {"reference": (3,)})
    for given in ({"train": "0-2"}, {"generate": "2-3"}):
        with pytest.raises(UserError, match="rank 2 holds a frozen role, and can neither train nor generate"):
            split(4, reference="2", **given)


@pytest.mark.parametrize(
    ("num_ranks", "settings", "line"),
    [
        (1, {}, "placement.mode: split needs at least two ranks: torchrun --nproc-per-node 2 ..."),
        (4, {"train": "0-1", "generate": "1-3"}, "placement: rank 1 cannot both train and generate with mode=split"),
        (4, {"train": "0", "generate": "2-3"}, "placement: rank 1 of 4 ranks neither trains nor generates"),
        (4, {"train": "0-3"}, "placement.generate: no rank is left for it"),
        (4, {"train": "2-9"}, "placement.train: there is no rank 9 among 4 ranks"),
        (
            4,
            {"generate": "a"},
            "placement.generate: must be ranks such as 0-3 or 0,2,4-7, or a share such as 25%, not 'a'",
        ),
        (4, {"train": "1-0"}, "placement.train: 1-0 is in reverse order; write 0-1"),
        (4, {"generate": "0, 3-2"}, "placement.generate: 3-2 is in reverse order; write 2-3"),
        (4, {"generate": "0-99999999999"}, "placement.generate: there is no rank 99999999999 among 4 ranks"),
        (4, {"train": 99 * "9"}, f"placement.train: must be {RANKS}, not '{99 * '9'}'"),
        (4, {"train": 400 * "9" + "%"}, f"placement.train: must be {RANKS}, not '{400 * '9'}%'"),
        (4, {"train": "0-"}, f"placement.train: must be {RANKS}, not '0-'"),
        (4, {"train": "5%"}, "placement.train: 5% of 4 ranks is 0; each side needs one"),
    ],
)
def test_a_mistake_is_one_line(num_ranks: int, settings: dict[str, str], line: str) -> None:
    with pytest.raises(UserError) as error:
        split(num_ranks, **settings)
    assert str(error.value) == line


def test_ranks_need_a_mode_that_splits_them() -> None:
    with pytest.raises(UserError, match="train: only with placement.mode=split"):
        PlacementConfig(train="0-1")


def test_ranks_are_told_as_people_write_them() -> None:
    assert ranks_do((0, 1, 2, 5, 7, 8), "train") == "ranks 0-2,5,7-8 train"
    assert ranks_do((3,), "generate") == "rank 3 generates"


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("start", [0, 7])
def test_no_answer_is_older_than_the_bound(staleness: int, start: int) -> None:
    for step in range(start + 1, start + 20):
        oldest = oldest_version(step, staleness, start)
        assert start <= oldest <= step - 1  # a policy that exists when the step before has been trained on
        assert step - 1 - oldest <= staleness
        assert oldest == start or step - 1 - oldest == staleness  # and no waiting for a newer one than is needed


def test_what_drives_an_engine_is_closed_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def closes(name: str) -> SimpleNamespace:
        return SimpleNamespace(policy=None, close=lambda: closed.append(name))

    module = sys.modules["spmd_rl.placement.colocated"]
    monkeypatch.setattr(module, "Rollouts", lambda *parts: closes("rollouts"))
    for part, name in (("engine", "build"), ("weights", "build")):
        monkeypatch.setattr(getattr(module, part), name, lambda *parts, part=part: closes(part))
    settings = GenerationSettings(RolloutConfig(), RewardsConfig(), seed=0, kv_tokens=64)
    cfg = MagicMock(**{"generation": settings, "engine.adapters": False})
    with ExitStack() as stack:
        job = MagicMock(cfg=cfg, stack=stack, starting=nullcontext, connect=lambda debug: (None, None))
        stack.enter_context(colocated(job))
    assert closed == ["rollouts", "engine"]


def test_rejected_tickets_bring_forward_those_that_follow() -> None:
    """Of steps of 4 tickets, the one at position 7 belongs to the next step, or to this one where 4 are rejected."""
    assert [last_use(3, 7, rejected, per_step=4) for rejected in (0, 3, 4, 9)] == [4, 4, 3, 3]
