"""Sidecars: rewards in CPU processes of their own, reached over ZMQ. Torch-free.

    with sidecar.connect(cfg.reward, world.node) as scorer:
        verdict = await scorer.score(prompt, answer, info)

`client` is the rank's side, `launcher` starts the node's `host`, which keeps a `pool` of workers per domain; a
`zygote` imports the rewarder's module and forks each `worker`. `direct` scores in this process, for `debug=true`.
"""

from spmd_rl.sidecar.scorer import check_domains, connect

__all__ = ["check_domains", "connect"]
