"""Sidecars: rewards and environments in separate CPU processes, reached over ZeroMQ. Torch-free.

    with sidecar.connect(cfg.reward, world.node) as scorer:
        verdict = await scorer.score(prompt, answer, info)

    with sidecar.connect_environments(cfg.env, world.node) as environments:
        session = await environments.reset(tag, seed)
        reply = await session.step(action)

| | |
|---|---|
| `scorer`, `launcher`, `support` | the rank's side: connect, start the node's host, find rows that no rewarder can
judge |
| `host_client`, `clients` | its connections to hosts, and clients for verdicts and sessions |
| `local` | rewarders and environments in this process, for `debug=true` |
| `host`, `event_loop` | the host, with a pool of workers per domain and environment |
| `process_pool`, `pool`, `env_pool` | the pools: common base, rewarders, environments |
| `sessions` | the host's sessions and their clients |
| `forkserver`, `worker`, `env_worker`, `services` | the workers, forked after the target's module has been imported |
| `reward_server`, `supervisor` | a domain's server, such as a judge |
| `sockets`, `frames`, `wire`, `http` | transport of bytes, the schema of messages, requests to servers |
| `fair_queue` | order in which clients are served |
| `env_replies` | check of environments' replies |
| `status`, `__main__` | the command line |
"""

from spmd_rl.sidecar.local import LocalEnvironments
from spmd_rl.sidecar.scorer import check_domains, connect, connect_both, connect_environments

__all__ = ["LocalEnvironments", "check_domains", "connect", "connect_both", "connect_environments"]
