"""What cannot be of `env` is told before the process group forms: one line, which names the key."""

from pathlib import Path

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.plugin_checks import check_envs
from spmd_rl.config.sections.env import EnvConfig, EnvsConfig
from spmd_rl.config.sections.run import JournalConfig

HERE = Path(__file__).parent


def check(debug: bool = False, **env) -> None:
    env = EnvConfig(**{"target": "session_toys:Counts"} | env)
    check_envs(EnvsConfig(tags={"toy": env}), JournalConfig(stall_seconds=600.0), debug)


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"target": "nowhere:X"}, "env.toy.target: nowhere:X cannot be imported: ModuleNotFoundError: "),
        ({"target": "session_toys:OnlyReset"}, "env.toy.target: session_toys:OnlyReset has no `step`"),
        ({"target": "session_toys:not_one"}, "env.toy.target: session_toys:not_one has no `reset` and no `step`"),
        ({"args": {"x": 1}}, "env.toy.target: session_toys:Counts cannot be built with env.toy.args={'x': 1}: "),
        ({"eval_args": {"y": 1}}, "env.toy.target: session_toys:Counts cannot be built with env.toy.args={'y': 1}: "),
        ({"target": "session_toys:Gone"}, "env.toy.target: session_toys:Gone ends its process by SIGKILL while it "),
        ({"packages": ["nowhere"]}, "env.toy.packages: nowhere is not installed here"),
        ({"workers": 10**6}, "env.toy.workers: 1000000 (all environments: 1000000) is too many for the "),
        (
            {"workers": 1000, "envs_per_worker": 1000, "mode": "process"},
            "env.toy.workers * env.toy.envs_per_worker: 1000000 (all environments: 1000000) is too many for the ",
        ),
        ({"step_timeout": 600.0}, "env.toy.step_timeout: a call may take 600 s, but journal.stall_seconds=600 ends "),
    ],
)
def test_one_line_for_each_mistake(env, line):
    with pytest.raises(UserError) as error:
        check(**env)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_what_can_be_is_let_pass():
    check(args={"goal": 3}, eval_args={"goal": 4})
    check(target="session_toys:make", args={"goal": 3})
    check(target="session_toys:NeedsSandbox")
    check(step_timeout=600.0, debug=True)
