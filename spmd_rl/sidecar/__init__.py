"""Sidecars: rewards and environments in separate CPU processes, reached over ZeroMQ. Torch-free.

    with sidecar.connect(cfg.reward, world.node) as scorer:
        verdict = await scorer.score(prompt, answer, info)
    with sidecar.connect_environments(cfg.env, world.node) as environments:
        session = await environments.reset(tag, seed)
        reply = await session.step(action)

| | |
|---|---|
| `scorer`, `launcher`, `support`, `local` | the rank's side |
| `host_client`, `clients` | connections to hosts |
| `host`, `event_loop`, `sessions`, `fair_queue` | the host |
| `process_pool`, `pool`, `env_pool` | its workers |
| `forkserver`, `worker`, `env_worker`, `env_replies`, `services` | a worker |
| `reward_server`, `supervisor` | a domain's server, such as a judge |
| `sockets`, `frames`, `wire`, `http` | transport and messages |
"""

from spmd_rl.sidecar.local import LocalEnvironments
from spmd_rl.sidecar.scorer import check_domains, connect, connect_both, connect_environments

__all__ = ["LocalEnvironments", "check_domains", "connect", "connect_both", "connect_environments"]
