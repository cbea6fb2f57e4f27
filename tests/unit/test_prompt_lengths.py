"""Prompts that are too long: left out with a count, or refused; the same on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config import RlvrConfig
from spmd_rl.config.schema import RewardConfig
from spmd_rl.data import Prompts
from spmd_rl.rollout.prompt_lengths import fit_prompts
from spmd_rl.sidecar.support import find_unsupported
from spmd_rl.types import Message, Prompt
from tests.fakes import FakeTokenizer


@dataclass
class Ranks:
    """A rank whose gathering also gets what each of the others would bring."""

    rank: int
    size: int
    others: list[Any]

    def gather(self, name: str, value: Any) -> list[Any]:
        self.others[self.rank] = value
        return self.others


def prompts() -> Prompts:
    made = [Prompt(f"id{n}", (Message("user", "x" * n),), "math", "") for n in range(1, 11)]
    return Prompts(made[:8], made[8:])


ALL = (*prompts().train, *prompts().eval)


def bench() -> Prompts:
    return Prompts((), prompts().train)


def settings(limit: int, overlong: str = "drop") -> RlvrConfig:
    cfg = RlvrConfig()
    cfg.rollout.max_prompt_tokens, cfg.data.overlong = limit, overlong
    return cfg


def sections(cfg: RlvrConfig) -> tuple:
    return cfg.rollout, cfg.data, cfg.reward


class OddRows:
    """A reward that cannot judge prompts of an odd length."""

    def score(self, prompt: Prompt, answer: str, info: Any) -> float:
        return 1.0

    def unsupported(self, prompt: Prompt) -> str:
        return "it is odd" if len(prompt.messages[0].content) % 2 else ""


@pytest.mark.parametrize("size", [1, 3])
def test_rows_that_their_reward_cannot_judge_are_left_out_and_counted(size: int, capsys: pytest.CaptureFixture) -> None:
    cfg = settings(100)
    cfg.reward.domains["math"] = RewardConfig(f"{__name__}:OddRows")
    brought: list[Any] = [
        find_unsupported(list(enumerate(ALL))[rank::size], cfg.reward.domains) for rank in range(size)
    ]

    class Both(Ranks):
        def gather(self, name: str, value: Any) -> list[Any]:
            return super().gather(name, value) if name == "start: rows" else [value]

    for rank in range(size):
        left, _, _ = fit_prompts(prompts(), FakeTokenizer(), *sections(cfg), Both(rank, size, brought))
        assert [p.id for p in (*left.train, *left.eval)] == ["id2", "id4", "id6", "id8", "id10"]
    told = "4 of 8 training rows and 1 of 2 held-out ones are left out, because their reward cannot judge them: "
    assert capsys.readouterr().err.splitlines() == [told + "5 x it is odd"]


def on_all_ranks(
    cfg: RlvrConfig, size: int, prompts: Callable[[], Prompts] = prompts
) -> list[tuple[Prompts, int, str]]:
    brought: list[Any] = [None] * size
    for rank in range(size):
        try:
            fit_prompts(prompts(), FakeTokenizer(), *sections(cfg), Ranks(rank, size, brought))
        except TypeError:
            assert rank < size - 1, "not all have brought theirs yet"
    return [fit_prompts(prompts(), FakeTokenizer(), *sections(cfg), Ranks(rank, size, brought)) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_all_ranks_leave_out_the_same_prompts_and_one_says_so(size: int, capsys: pytest.CaptureFixture) -> None:
    found = on_all_ranks(settings(5), size)
    for left, longest, prompt_id in found:
        assert [p.id for p in left.train] == ["id1", "id2", "id3", "id4", "id5"] and left.eval == ()
        assert (longest, prompt_id, left.num_dropped) == (5, "id5", 5)
    line = (
        "warning: data.overlong=drop: left out 3 of 8 training and 2 of 2 held-out prompts, which are longer than "
        "rollout.max_prompt_tokens=5 (the longest has 10 tokens)"
    )
    assert capsys.readouterr().err.splitlines()[-1] == line


def test_of_rows_to_evaluate_none_vanishes_in_silence(capsys: pytest.CaptureFixture) -> None:
    ((left, *_),) = on_all_ranks(settings(5), 1, bench)
    assert [p.id for p in left.eval] == ["id1", "id2", "id3", "id4", "id5"]
    assert "left out 3 of 8 held-out prompts, which are longer than" in capsys.readouterr().err
    with pytest.raises(UserError, match="all 8 held-out prompts are longer, the shortest has 1 tokens"):
        on_all_ranks(settings(0), 1, bench)


def test_nothing_is_said_where_all_fit(capsys: pytest.CaptureFixture) -> None:
    ((left, longest, _),) = on_all_ranks(settings(10), 1)
    assert (len(left.train), len(left.eval), longest, left.num_dropped) == (8, 2, 10, 0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("limit", "overlong", "line"),
    [
        (9, "error", "rollout.max_prompt_tokens=9: prompt id10 has 10 tokens, and 0 other prompts are too long"),
        (5, "error", "rollout.max_prompt_tokens=5: prompt id10 has 10 tokens, and 4 other prompts are too long"),
        (0, "drop", "rollout.max_prompt_tokens=0: all 8 training prompts are longer, the shortest has 1 tokens"),
    ],
)
def test_too_much_is_an_error(limit: int, overlong: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        on_all_ranks(settings(limit, overlong), 1)
    assert str(caught.value).startswith(line)
