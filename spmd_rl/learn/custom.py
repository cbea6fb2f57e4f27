"""The loss and the advantage estimator that the settings name: built in, or a user's function.

Keyword-only parameters are keys of `algorithm` (a user's: `config/algorithm_targets.py`). A user's function has the
signature of ours (`algo/policy`, `algo/advantages`), and its result is checked.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar

from torch import Tensor

from spmd_rl.algo import ADVANTAGES, POLICY_LOSSES, TOKEN_ADVANTAGES
from spmd_rl.algo.inputs import Scored, Tokens
from spmd_rl.base.errors import UserError
from spmd_rl.config.algorithm_targets import is_own, num_tensors, own_function
from spmd_rl.config.schema import AlgorithmConfig


def policy_loss(settings: AlgorithmConfig) -> Callable[[Tokens], tuple[Tensor, Mapping[str, Tensor]]]:
    """Return the policy loss: from tokens to a loss [N] and metrics [N]."""
    if not is_own(settings, "loss"):
        return bind(POLICY_LOSSES[settings.loss], settings)
    function = own_function(settings, "loss")

    def loss(tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        found = function(tokens)
        values, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        _check(settings, "loss", values, tokens.logprobs)
        for name, metric in metrics.items():
            _check(settings, "loss", metric, tokens.logprobs, f" as {name!r}")
        return values, {name: metric.detach() for name, metric in metrics.items()}

    return loss


def answer_advantage(settings: AlgorithmConfig) -> Callable[[Scored], Tensor] | None:
    """Return the estimator of whole answers, to float64 [n]; None if the settings name one of tokens."""
    if not is_own(settings, "advantage"):
        function = ADVANTAGES.get(settings.advantage)
        return bind(function, settings) if function else None
    if num_tensors(settings, "advantage") != 1:
        return None
    function = own_function(settings, "advantage")

    def advantage(scored: Scored) -> Tensor:
        return _check(settings, "advantage", function(scored), scored.scores).double()

    return advantage


def token_advantage(settings: AlgorithmConfig) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the token-level estimator, from rewards, values and samples to advantages and returns, float64 [N]; None
    if the settings name one of answers.
    """
    if not is_own(settings, "advantage"):
        function = TOKEN_ADVANTAGES.get(settings.advantage)
        return bind(function, settings) if function else None
    if num_tensors(settings, "advantage") != 3:
        return None
    function = own_function(settings, "advantage")

    def advantage(rewards: Tensor, values: Tensor | None, samples: Tensor) -> tuple[Tensor, Tensor]:
        found = function(rewards, values, samples)
        advantages, returns = found if isinstance(found, tuple) and len(found) == 2 else (found, found)
        for tensor in (advantages, returns):
            _check(settings, "advantage", tensor, rewards)
        return advantages, returns

    return advantage


def _check(settings: AlgorithmConfig, choice: str, found: Any, like: Tensor, what: str = "") -> Tensor:
    """Return a user function's result. UserError unless it has the shape of `like`."""
    if not isinstance(found, Tensor) or found.shape != like.shape:
        got = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        target = getattr(settings, choice)
        raise UserError(f"algorithm.{choice}: {target} returned {got}{what}, not a tensor of shape {list(like.shape)}")
    return found


R = TypeVar("R")


@cache
def settings_read(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the settings that `function` reads."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def bind(function: Callable[..., R], settings: Any) -> Callable[..., R]:
    """Return `function` with its keyword-only parameters bound to fields of `settings`."""
    return partial(function, **{name: getattr(settings, name) for name in settings_read(function)})
