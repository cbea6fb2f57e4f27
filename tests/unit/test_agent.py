"""The episode of an agent over a scripted policy and scripted environments: limits, ends, penalties, retries."""

import asyncio
from array import array

import pytest

from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.config.sections.env import EnvConfig, EnvsConfig
from spmd_rl.data import EnvTasks
from spmd_rl.model.bridge import Bridge
from spmd_rl.rollout import Agent, Context, Sampling
from spmd_rl.rollout.agent import find_action
from spmd_rl.rollout.episode import Budget, first_of, in_order, play
from spmd_rl.rollout.prompt_text import first_messages, fresh_messages, next_messages
from spmd_rl.types import Completion, EnvReply, Prompt, Request, Sample, SessionLost

TASK = Prompt("0" * 32, (), "maze", "", {"seed": 7, "held_out": False})


class Chars:
    """A tokenizer of a token for each character; 0 ends an answer."""

    stop_ids, name = (0,), "chars"
    append_only = keeps_thoughts = True

    def render(self, messages) -> array:
        return array("i", map(ord, "".join(f"{m.role[0]}:{m.text}|" for m in messages)))

    def bridge(self, messages) -> Bridge:
        return Bridge(array("i", [0]) + self.render(messages), self.append_only, self.keeps_thoughts)

    def decode(self, ids) -> str:
        return "".join(chr(i) for i in ids if i)


class Policy:
    """An engine loop that answers from a list."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.requests = list(answers), []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        text = self.answers[(len(self.requests) - 1) % len(self.answers)]
        ids = array("i", [*map(ord, text), 0])[: request.max_new_tokens]
        ended = "stop" if len(ids) == len(text) + 1 else "length"
        zeros = array("f", bytes(4 * len(ids)))
        return Completion(request.id, ids, zeros, array("i", bytes(4 * len(ids))), ended)


class Maze:
    """Ends after `length` steps; "fall" and "" are no actions. `failures`: raised by the next steps, in order."""

    def __init__(self, length: int = 3, failures: tuple[SessionLost, ...] = (), **info) -> None:
        self.length, self.failures, self.info, self.outstanding, self.closed, self.actions = (
            length,
            list(failures),
            info,
            0,
            0,
            [],
        )

    async def reset(self, tag: str, seed: int, held_out: bool = False, solve: bool = False) -> "Maze":
        assert (tag, seed) == ("maze", 7)
        self.reply, self.actions = EnvReply("room 0", info={"instruction": "find out", **self.info}), []
        return self

    async def step(self, action: str) -> EnvReply:
        if self.failures:
            raise self.failures.pop(0)
        self.actions.append(action)
        valid, number = action not in ("", "fall"), len(self.actions)
        info = {"metrics": {"action_is_valid": float(valid), "success": float(number == self.length)}}
        info["metrics_agg_mode"] = {"success": "last"}
        self.reply = EnvReply(f"room {number}", float(valid), number == self.length, False, info)
        return self.reply

    async def close(self) -> None:
        self.closed += 1


def context(
    policy: Policy, maze: Maze, tokenizer: object = None, tokens: int = 1000, turns: int | None = None
) -> Context:
    sampling, budget = Sampling(0, "train", 1.0, 40), Budget(tokens, turns)
    return Context(TASK, 3, 1, lambda *parts: hash(parts), sampling, budget, tokenizer or Chars(), policy, None, maze)


def episode(policy: Policy, maze: Maze, **how) -> list[Sample]:
    settings = {"target": "my:Maze", "system": ""} | {
        k: how.pop(k) for k in list(how) if k in EnvConfig.__dataclass_fields__
    }
    agent = Agent(EnvsConfig(tags={"maze": EnvConfig(**settings)}))
    return asyncio.run(play(agent, context(policy, maze, **how)))


def stop(sample: Sample) -> str:
    return next(name for name, value in sample.verdict.parts.items() if name.startswith("stop/") and value)


def test_an_episode_is_one_conversation_whose_tokens_are_never_rendered_again() -> None:
    policy, maze = Policy("<answer> go </answer>"), Maze()
    (sample,) = episode(policy, maze)
    assert maze.actions == ["go", "go", "go"] and maze.closed == 1
    assert sample.verdict.score == 3.0 and stop(sample) == "stop/terminated"
    assert sample.verdict.parts["success"] == 1.0 and sample.verdict.parts["num_actions"] == 3.0
    for before, after in zip(policy.requests, policy.requests[1:], strict=False):
        assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
    sent = Chars().decode(policy.requests[-1].prompt_ids)
    assert sent.count("find out") == 1 and "room 2" in sent and sent.count("<answer> go </answer>") == 2
    assert [turn.step.reward for turn in sample.turns] == [1.0, 1.0, 1.0]
    assert len({turn.step.state for turn in sample.turns}) == 3


@pytest.mark.parametrize(
    ("pattern", "text", "action"),
    [
        ("action", "<answer>go</answer>", "go"),
        ("action", "well, <answer>\n go on\n</answer>.", "go on"),
        ("action", "<answer>go</answer><answer>stop</answer>", None),
        ("action", "go", None),
        ("action", "<answer> </answer>", None),
        ("think", "<think>hm</think> <answer>go</answer>", "go"),
        ("think", "<answer>go</answer>", None),
        ("think", "<think>hm</think><answer>go</answer> and more", None),
        ("tool", '<tool_call>{"name": "f"}</tool_call>', '{"name": "f"}'),
        ("all", " go \n", "go"),
        (r"\\boxed\{(.*?)\}", r"so \boxed{go}", "go"),
    ],
)
def test_an_action_is_found_exactly_once_or_there_is_none(pattern: str, text: str, action: str | None) -> None:
    assert find_action(EnvConfig("my:Maze", pattern=pattern).pattern_for(tools=True), text) == action


def test_missing_and_invalid_actions_cost_the_penalty_and_reach_the_environment_empty() -> None:
    maze = Maze(length=4)
    policy = Policy("<answer>go</answer>", "go", "<answer>fall</answer>", "<answer>go</answer>")
    (sample,) = episode(policy, maze, format_penalty=-0.25)
    assert maze.actions == ["go", "", "fall", "go"]
    assert [turn.step.reward for turn in sample.turns] == [1.0, -0.25, -0.25, 1.0]
    assert [turn.step.action for turn in sample.turns] == ["go", None, "fall", "go"]
    assert sample.verdict.score == 1.5 and sample.verdict.parts["action_is_valid"] == 0.5
    assert sample.verdict.parts["format_penalty"] == -0.125


def test_actions_that_change_nothing_cost_a_penalty_of_their_own() -> None:
    env = EnvConfig("maze:Maze", format_penalty=-0.5, ineffective_penalty=-0.25)
    bump, step, wrong = (
        {"action_is_valid": v, "action_is_effective": e} for v, e in ((1.0, 0.0), (1.0, 1.0), (0.0, 0.0))
    )
    found = [
        sum(env.penalties(action, said).values())
        for action, said in (("go", bump), ("go", step), ("?", wrong), (None, {}), ("go", {}))
    ]
    assert found == [-0.25, 0.0, -0.5, -0.5, 0.0]


def test_limits_end_an_episode_with_their_own_reasons() -> None:
    (sample,) = episode(Policy("<answer>go</answer>"), Maze(length=9), turns=2)
    assert stop(sample) == "stop/max_turns" and len(sample.turns) == 2 and sample.turns[-1].finish_reason == "stop"
    (sample,) = episode(Policy("<answer>go</answer>"), Maze(length=9), tokens=150)
    assert stop(sample) == "stop/max_context" and sample.turns[-1].finish_reason == "length"
    assert all(turn.step is not None for turn in sample.turns)
    (sample,) = episode(Policy("x" * 60), Maze(length=2))
    assert sample.verdict.parts["cut_short"] == 1.0 and stop(sample) == "stop/terminated"
    (sample,) = episode(Policy("<answer>go</answer>"), Maze(), tokens=10)
    assert sample.verdict.status == "error" and not sample.turns[0].token_ids


def test_a_lost_environment_costs_its_trajectory_which_is_played_again_with_other_noise() -> None:
    policy, maze = Policy("<answer>go</answer>"), Maze(failures=(SessionLost("lost", "killed"),))
    (sample,) = episode(policy, maze)
    assert sample.verdict.score == 3.0 and len(sample.turns) == 3 and maze.closed == 2
    assert policy.requests[0].prompt_ids == policy.requests[1].prompt_ids
    assert policy.requests[0].seed != policy.requests[1].seed


@pytest.mark.parametrize("reason", ["timeout", "error", "lost"])
def test_what_becomes_of_an_environment_that_fails_again_and_again(reason: str) -> None:
    def fails() -> Maze:
        return Maze(failures=[SessionLost(reason, "again")] * 3)

    (sample,) = episode(Policy("<answer>go</answer>"), fails(), retries=2)
    assert not sample.verdict.scored and "env.maze: seed 7" in sample.verdict.detail
    (sample,) = episode(Policy("<answer>go</answer>"), fails(), retries=2, on_error="zero")
    assert sample.verdict.score == 0.0 and stop(sample) == f"stop/env_{reason}"
    with pytest.raises(RunFailed, match="again"):
        episode(Policy("<answer>go</answer>"), fails(), retries=2, on_error="raise")


def test_a_template_that_drops_thoughts_begins_a_segment_of_the_same_trajectory() -> None:
    tokenizer, policy = Chars(), Policy("<think>hm</think><answer>go</answer>")
    tokenizer.keeps_thoughts = False
    samples = episode(policy, Maze(), tokenizer=tokenizer)
    assert [sample.answer for sample in samples] == [1, 1 + (1 << 16), 1 + (2 << 16)]
    assert [sample.last for sample in samples] == [False, False, True]
    assert {sample.unit for sample in samples} == {1} and samples[-1].verdict.score == 3.0
    assert samples[-1].verdict.parts["segments"] == 3.0
    assert "room 1" in Chars().decode(samples[-1].turns[0].prompt_ids)


@pytest.mark.parametrize(
    ("history", "shown"), [(0, []), (1, ["room 1"]), (2, ["room 0", "room 1"]), (5, ["room 0", "room 1"])]
)
def test_a_prompt_made_afresh_shows_exactly_the_last_turns(history: int, shown: list[str]) -> None:
    samples = episode(Policy("<answer>go</answer>"), Maze(), history=history)
    last = Chars().decode(samples[-1].turns[0].prompt_ids)
    assert [f"room {n}" for n in range(2) if f"room {n}" in last] == shown and last.count("room 2") == 1
    assert len(samples) == 3 and all(len(sample.turns) == 1 for sample in samples)


def test_the_reminder_follows_from_the_pattern_and_braces_of_an_observation_stay() -> None:
    start = EnvReply("{turn} {x}", info={"instruction": "find {observation}", "suffix": "once"})
    env = EnvConfig(
        "my:Maze",
        pattern="think",
        template="{turn}/{turns_left}\n{instruction}\n{history}\n{observation}{suffix}\n{reminder}",
    )
    system, user = first_messages(env, start, {"turn": 1, "turns_left": 5, "max_tokens": 9})
    assert system.role == "system"
    lines = user.text.split("\n")
    assert lines[:3] == ["1/5", "find {observation}", "{turn} {x}once"] and "<think>" in lines[3]
    (later,) = next_messages(env, start, EnvReply("there"), {})
    assert "once" not in later.text and later.text.startswith("there")
    tools = EnvReply("", info={"tools": [{"name": "f"}]})
    assert next_messages(env, tools, EnvReply("4"), {})[0].role == "tool"
    assert '"name": "f"' in fresh_messages(env, tools, tools, (), {})[0].text


def test_the_first_episodes_to_end_make_the_group() -> None:
    given_up: list[int] = []

    async def ends(number: int, seconds: float) -> list[Sample]:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            given_up.append(number)
            raise
        return [Sample(0, number, (), None)]

    async def group() -> list[list[Sample]]:
        return await first_of([asyncio.ensure_future(ends(n, s)) for n, s in enumerate((0.02, 60, 0.0))], 2)

    found = asyncio.run(group())
    assert [sample.answer for sample in in_order(found)] == [0, 2] and given_up == [1]


def test_tasks_are_a_function_of_the_seed_and_held_out_ones_of_nothing() -> None:
    envs = EnvsConfig(tags={"a": EnvConfig("my:A", share=3), "b": EnvConfig("my:B")})
    tasks, again = EnvTasks(envs, 40), EnvTasks(envs, 40)
    drawn = [tasks.ticket(n, 5)[1] for n in range(400)]
    assert drawn == [again.ticket(n, 5)[1] for n in range(400)] != [tasks.ticket(n, 6)[1] for n in range(400)]
    assert sum(task.domain == "a" for task in drawn) == 300 and sum(task.domain == "a" for task in tasks.eval) == 30
    seeds = [{task.extra["seed"] for task in some} for some in (drawn, tasks.eval)]
    assert not seeds[0] & seeds[1] and len(seeds[0]) == 400 and max(seeds[1]) < 1 << 31
    assert tasks.fingerprint() != EnvTasks(envs, 41).fingerprint()


@pytest.mark.parametrize(
    ("shares", "counts"),
    [
        ({"a": 3, "b": 1, "c": 0}, {"a": 30, "b": 10, "c": 20}),
        ({"a": 1, "b": 0}, {"a": 30, "b": 30}),
        ({"a": 0.5, "b": 0, "c": 0}, {"a": 20, "b": 20, "c": 20}),
        ({"a": 0.7, "b": 0.1, "c": 0.2, "d": 0}, {"a": 31, "b": 5, "c": 9, "d": 15}),
    ],
    ids=str,
)
def test_an_environment_with_share_0_is_evaluated_and_never_trained_on(shares: dict, counts: dict) -> None:
    tags = {tag: EnvConfig(f"my:{tag.upper()}", share=share) for tag, share in shares.items()}
    tasks = EnvTasks(EnvsConfig(tags=tags), 60)
    found = {tag: sum(task.domain == tag for task in tasks.eval) for tag in shares}
    assert sum(found.values()) == 60 and all(abs(found[tag] - count) <= 1 for tag, count in counts.items())
    for drawn in ([tasks.ticket(n, 5)[1] for n in range(100)], [tasks.demonstration(n, 5) for n in range(100)]):
        assert {task.domain for task in drawn} == {tag for tag, share in shares.items() if share}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"pattern": "<go>"}, "pattern: must be one of"),
        ({"pattern": "("}, "pattern: '(' is not a regular expression"),
        ({"format_penalty": 0.1}, "format_penalty: is added"),
        ({"ineffective_penalty": 0.1}, "ineffective_penalty: is added"),
        ({"template": "go"}, "template: must contain {observation}"),
        ({"target": "Maze"}, "target: must be module:Class"),
        ({"mode": "fibre"}, "mode: unknown name 'fibre'"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(settings: dict, line: str) -> None:
    with pytest.raises(UserError) as raised:
        EnvConfig(**({"target": "my:Maze"} | settings))
    assert str(raised.value).startswith(line)
