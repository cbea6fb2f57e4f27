"""Sidecars: rewards and environments in CPU processes of their own, reached over ZeroMQ. Torch-free.

    with sidecar.connect(cfg.reward, world.node) as scorer:
        verdict = await scorer.score(prompt, answer, info)

    with sidecar.connect_environments(cfg.env, world.node) as environments:
        session = await environments.reset(tag, seed)
        reply = await session.step(action)

| | |
|---|---|
| `scorer`, `launcher` | the rank's side: connect, start the node's host |
| `host_client`, `clients` | its connections to hosts, and its two clients over them: verdicts, sessions |
| `local` | rewarders and environments in this process, for `debug=true` |
| `host`, `event_loop` | the host, which keeps a pool of workers for each domain and each environment |
| `process_pool`, `pool`, `env_pool` | the pools: what both have in common, of rewarders, of environments |
| `sessions` | the host's book of sessions and their clients |
| `forkserver`, `worker`, `env_worker`, `services` | the workers, forked after the target's module has been imported |
| `reward_server`, `supervisor` | a domain's own server, such as a judge |
| `sockets`, `frames` | what the bytes travel on (their schema is `spmd_rl.sidecar.wire`) |
| `env_replies` | the check of what environments return |
| `status`, `__main__` | the command line |
"""

from spmd_rl.sidecar.local import LocalEnvironments
from spmd_rl.sidecar.scorer import check_domains, connect, connect_both, connect_environments

__all__ = ["LocalEnvironments", "check_domains", "connect", "connect_both", "connect_environments"]
