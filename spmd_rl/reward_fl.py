"""Reward feedback for diffusion models of pictures and videos: one program that every rank runs from top to bottom.

    torchrun --nproc-per-node 2 -m spmd_rl.reward_fl +experiment=demo_reward_fl
    python -m spmd_rl.reward_fl +experiment=demo_reward_fl feedback=flow_grpo

Lines marked [all] are collectives, as in `rlvr.py`.
"""

from functools import partial

from spmd_rl.config import RewardFlConfig, main


def run(cfg: RewardFlConfig) -> None:
    """Train for `cfg.steps` steps, from the newest checkpoint if any."""
    from spmd_rl import sidecar
    from spmd_rl.data import Prompts

    # Validate rows before importing torch, so that a mistake in a row fails within a second.
    prompts = Prompts.load(cfg.data)
    if cfg.reward.domains:
        sidecar.check_domains({p.domain for p in (*prompts.train, *prompts.eval)}, cfg.reward)

    from spmd_rl.checkpoint.flow_export import FlowExport
    from spmd_rl.job import Job
    from spmd_rl.learn.feedback import Feedback
    from spmd_rl.rollout.pictures import PictureRollouts, open_flow
    from spmd_rl.train import build_denoisers
    from spmd_rl.train.denoising import denoiser_source

    with Job.open(cfg, {"data.train": prompts.train, "data.eval": prompts.eval}, prompts) as job:  # [all]
        if job.is_over:
            return
        with job.starting():
            flow = open_flow(cfg, job.world)  # [all]
        build = partial(build_denoisers, cfg.denoisers, source=denoiser_source(flow))
        place, world, track = job.train(build), job.world, job.track  # [all]
        rollouts = PictureRollouts(cfg, prompts, flow, place.roles.policy, world, job.connect(cfg.debug)[0])
        learner = Feedback(cfg, rollouts, place.roles, world)
        export = FlowExport(place.roles.policy, flow, world, has_adapters=cfg.policy.lora.rank > 0)
        saver, start = job.restore(place, export, rollouts=rollouts)  # [all]
        if start == 0:
            with track.step(0):
                track.add(learner.evaluate(0, track.log_eval))  # [all]
        for step in job.steps(start, saver):
            with track.step(step):
                gallery = rollouts.collect(step)  # [all]
                updates = learner.prepare(gallery)  # [all] advantages, velocities of frozen policies
                track.log_samples(step, learner.rows(gallery))
                track.add(gallery.metrics() | learner.update(updates))  # [all]
                track.add(learner.evaluate(step, track.log_eval))  # [all] when due
                saver.maybe_save(step, last=step == cfg.steps)  # [all]


if __name__ == "__main__":
    previews = "spmd_rl.tools.dry_run_pictures:show", "spmd_rl.tools.plan.pictures:show"
    main("reward_fl", RewardFlConfig, run, None, *previews)
