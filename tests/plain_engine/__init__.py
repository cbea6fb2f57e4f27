"""`PlainEngine` as an engine that `engine.name` can choose: this folder, and a line in `ENGINES`."""

from typing import Any

from spmd_rl.config.engines import EngineFacts


def build(settings: Any, policy: Any, *_: Any) -> Any:
    """See `engine.build`."""
    from tests.plain_engine.engine import PlainEngine

    return PlainEngine(policy.model)


ENGINE = EngineFacts(build=build, title="plain", latent_attention=True)
