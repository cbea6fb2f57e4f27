"""A reward that is a plain function: it becomes a rewarder, which fills each parameter by its name.

    def score(prompt, answer, info): ...          # as a rewarder's method, by any three names
    def score(answer, ground_truth): ...          # any of the names in `VALUES`
    def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...  # verl's
    def reward(completions, ground_truth, **kwargs): ...  # TRL's: many answers, a list of numbers

A parameter may also be a key of `reward.<domain>.args`, or a service (`http`, `sandbox`). With TRL's parameter
`completions`, `prompts` and `completions` are lists of messages, and every other parameter is a list of the rows'
values; `**kwargs` gets all that every row has. Standard library only.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_rl.types import AnswerInfo, Message, Prompt

GOLD = ("ground_truth", "solution")
VALUES: Mapping[str, Callable[[Prompt, str, AnswerInfo], Any]] = {
    "prompt": lambda prompt, answer, info: prompt,
    "info": lambda prompt, answer, info: info,
    **dict.fromkeys(("answer", "completion", "response", "solution_str"), lambda prompt, answer, info: answer),
    # Of a row whose ground truth are tests, the column as it is.
    **dict.fromkeys(GOLD, lambda prompt, answer, info: prompt.ground_truth or prompt.extra.get("ground_truth", "")),
    "domain": lambda prompt, answer, info: prompt.domain,
    "data_source": lambda prompt, answer, info: prompt.extra.get("data_source", prompt.domain),
    "extra": lambda prompt, answer, info: prompt.extra,
    "extra_info": lambda prompt, answer, info: prompt.extra.get("extra_info", prompt.extra),
}
"""Values of parameters, by name."""
TRL = "completions"


class FunctionReward:
    """The rewarder of a function of one answer. `score` is `async` if the function is."""

    def __init__(self, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
        """given: the constant arguments. TypeError, which names the parameter, for an unknown one."""
        names = _names(function, given)
        if not names:
            raise TypeError(f"it has no parameter for the answer: known are {', '.join(VALUES)}")
        if all(name in VALUES for name in names):

            def arguments(*values: Any) -> tuple[tuple, dict[str, Any]]:
                return (), {name: VALUES[name](*values) for name in names} | given

        else:  # `score(p, a, i)`
            strange = next(name for name in names if name not in VALUES)
            if len(names) != 3 or any(name in VALUES for name in names):
                known = ", ".join(VALUES)
                raise TypeError(
                    f"parameter `{strange}` is unknown: known are {known}; or give it in args, or a default"
                )

            def arguments(*values: Any) -> tuple[tuple, dict[str, Any]]:
                return values, dict(given)

        def score(prompt: Prompt, answer: str, info: AnswerInfo) -> Any:
            positional, keywords = arguments(prompt, answer, info)
            return function(*positional, **keywords)

        async def score_later(prompt: Prompt, answer: str, info: AnswerInfo) -> Any:
            return await score(prompt, answer, info)

        self.score = score_later if is_async(function) else score


class BatchFunctionReward:
    """The rewarder of a function of many answers, with TRL's parameters."""

    def __init__(self, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
        """given: as in `FunctionReward`. TypeError for an `async` function."""
        if is_async(function):
            raise TypeError(f"with `{TRL}` it must be a plain `def`; async def needs one answer: `completion`")
        self._function, self._given = function, given
        self._columns = [name for name in _names(function, given) if name not in (TRL, "prompts")]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
        self._takes_prompts = self._takes_all or "prompts" in inspect.signature(function).parameters

    def score_batch(self, prompts: Sequence[Prompt], answers: Sequence[str], infos: Sequence[AnswerInfo]) -> Any:
        """Score all answers in one call. KeyError if a row lacks a parameter."""
        names = set(self._columns)
        if self._takes_all:
            # TRL passes columns as lists, so a column must exist in all rows of the batch.
            shared = set.intersection(*(set(prompt.extra) for prompt in prompts))
            names |= {*GOLD, "answer", *shared} - {TRL, *self._given}
        columns = {name: [_column(prompt, name) for prompt in prompts] for name in names}
        if self._takes_prompts:
            columns["prompts"] = [list(map(_chat, prompt.messages)) for prompt in prompts]
        completions = [[{"role": "assistant", "content": answer}] for answer in answers]
        return self._function(**{TRL: completions}, **columns, **self._given)


def reward_of(function: Callable[..., Any], given: Mapping[str, Any]) -> FunctionReward | BatchFunctionReward:
    """Return the rewarder of a function; given: the constant arguments."""
    # Raises TypeError for an argument that the function does not take.
    inspect.signature(function).bind_partial(**given)
    takes_many = TRL in inspect.signature(function).parameters
    return (BatchFunctionReward if takes_many else FunctionReward)(function, given)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True if a function, or an object's `__call__`, gives an awaitable."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _names(function: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """Return the parameters to fill in: required ones, and optional ones with a known name."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in given]
    plain = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return [p.name for p in plain if p.default is p.empty or p.name in VALUES]


def _chat(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.openai_content, **message.others}


def _column(prompt: Prompt, name: str) -> Any:
    if name in prompt.extra:
        return prompt.extra[name]
    if name in (*GOLD, "answer"):
        return prompt.ground_truth
    raise KeyError(f"`{name}` is a parameter of the reward, but no key of row {prompt.id}")
