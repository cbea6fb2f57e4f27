"""A game of TextArena by its id; the model is player 0. An action without square brackets gets them.

    env.number.target=envs.adapters.textarena_id:TextArenaEnv env.number.args.id=GuessTheNumber-v0

A game for more players needs `opponent`, `module:function`, from its player's text to an action. TextArena draws from
the global generators, see `global_random`. It rewards only at the end, and judges moves by its own rules; most games
forgive one invalid move. An episode succeeds with a reward of 1.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from .global_random import OwnRandom


class TextArenaEnv:
    """An environment that plays `textarena.make(id, **args)` without wrappers, so that observations hold
    only new text.
    """

    def __init__(
        self,
        id: str,
        args: Mapping[str, Any] | None = None,
        players: int = 1,
        opponent: str = "",
        brackets: bool = True,
    ) -> None:
        """Make the game. ValueError for more players without an opponent; TextArena's exception for an unknown id
        passes through.
        """
        import textarena

        if players > 1 and not opponent:
            raise ValueError(f"players={players}: name an opponent, module:function")
        module, _, name = opponent.partition(":")
        self._opponent = getattr(importlib.import_module(module), name) if opponent else None
        self._random, self._players, self._brackets = OwnRandom(), players, brackets
        with self._random.in_place():
            self._env = textarena.make(id if id.endswith("-raw") else f"{id}-raw", **(args or {}))
        self._kinds = textarena.ObservationType

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin a game; opponents move until it is the model's turn."""
        with self._random.in_place(seed):
            self._env.reset(num_players=self._players, seed=seed)
            self._let_others_play(False)
            text, _ = self._read()
        return text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act, then let the opponents act."""
        with self._random.in_place():
            done, _ = self._env.step(self._bracketed(action))
            done = self._let_others_play(bool(done))
            text, refused = self._read()
            rewards, about = self._env.close() if done else ({}, {})
        mine = about.get(0, {})
        reward = float((rewards or {}).get(0, 0.0))
        valid = bool(action.strip()) and not refused and not mine.get("invalid_move")
        metrics = {
            "success": float(done and reward >= 1.0),
            "action_is_valid": float(valid),
            "action_is_effective": float(valid),
        }
        text = "\n".join(part for part in (text, str(mine.get("reason") or "")) if part)
        return text, reward, done, False, {"metrics": metrics, "metrics_agg_mode": {"success": "last"}}

    def _let_others_play(self, done: bool) -> bool:
        while not done and self._env.state.current_player_id != 0:
            _, messages = self._env.get_observation()
            done, _ = self._env.step(self._opponent("\n".join(text for _, text, _ in messages)))
        return bool(done)

    def _read(self) -> tuple[str, bool]:
        """Return player 0's unread text, without its own moves, and True if it reports an invalid move."""
        messages, self._env.state.observations[0] = self._env.state.observations[0], []
        shown = [(text, kind) for sender, text, kind in messages if sender != 0 or kind != self._kinds.PLAYER_ACTION]
        return "\n".join(text for text, _ in shown), any(kind == self._kinds.GAME_ADMIN for _, kind in shown)

    def _bracketed(self, action: str) -> str:
        return action if not self._brackets or "[" in action or not action.strip() else f"[{action}]"
