"""`rollout.target`: what cannot be an episode is told in one line, before the process group forms."""

import sys

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.checks import check_episode
from spmd_rl.config.schema import RolloutConfig


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (None, "rollout.target: my_mistake:mine cannot be imported: ModuleNotFoundError: No module named 'my_mistake'"),
        ("import nothing_there", "rollout.target: my_mistake:mine cannot be imported: ModuleNotFoundError: "),
        ("x = 1", "rollout.target: my_mistake:mine cannot be used: my_mistake has no `async def mine`"),
        ("def mine(ctx): pass", "rollout.target: my_mistake:mine cannot be used: my_mistake has no `async def mine`"),
        ("async def mine(): pass", "rollout.target: my_mistake:mine cannot be called with one argument, its context: "),
        ("async def mine(ctx, n): pass", "rollout.target: my_mistake:mine cannot be called with one argument, its co"),
    ],
    ids=str,
)
def test_what_cannot_be_an_episode_is_told_before_the_start(tmp_path, monkeypatch, body: str | None, line: str) -> None:
    if body is not None:
        (tmp_path / "my_mistake.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_mistake", raising=False)
    with pytest.raises(UserError) as raised:
        check_episode(RolloutConfig(target="my_mistake:mine"))
    assert str(raised.value).startswith(line)


def test_an_episode_or_none_passes() -> None:
    check_episode(RolloutConfig(target="spmd_rl.rollout:single_turn"))
    check_episode(RolloutConfig())
