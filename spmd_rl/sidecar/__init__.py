"""Sidecars: rewards and environments in separate CPU processes, reached over ZeroMQ. Torch-free.

    with sidecar.connect(cfg.reward, world.node) as scorer:
        verdict = await scorer.score(prompt, answer, info)
    with sidecar.connect_environments(cfg.env, world.node) as environments:
        session = await environments.reset(tag, seed)
        reply = await session.step(action)

| | |
|---|---|
| `scorer`, `launcher`, `support` | the rank's side: connect, start the node's host, find unjudgeable rows |
| `host_client`, `clients` | connections to hosts; clients for verdicts and sessions |
| `local` | rewarders and environments in this process, for `debug=true` |
| `host`, `event_loop` | the host, with a worker pool per domain and environment |
| `process_pool`, `pool`, `env_pool` | the pools: common base, rewarders, environments |
| `sessions` | the host's sessions |
| `forkserver`, `worker`, `env_worker`, `services` | the workers, forked after the import of their target |
| `reward_server`, `supervisor` | a domain's server, such as a judge |
| `sockets`, `frames`, `wire`, `http` | transport, message schema, requests to servers |
| `fair_queue`, `env_replies` | order of clients; check of replies |
| `status`, `__main__` | the command line |
"""

from spmd_rl.sidecar.local import LocalEnvironments
from spmd_rl.sidecar.scorer import check_domains, connect, connect_both, connect_environments

__all__ = ["LocalEnvironments", "check_domains", "connect", "connect_both", "connect_environments"]
