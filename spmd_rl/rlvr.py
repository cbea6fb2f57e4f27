"""Reinforcement learning with verifiable rewards: one program that every rank runs from top to bottom.

    torchrun --nproc-per-node 2 -m spmd_rl.rlvr +experiment=demo rollout.temperature=0.9
    python -m spmd_rl.rlvr +experiment=demo debug=true

Marked lines are collectives: every rank must reach an [all] line, every trainer rank a [train] line. Only trainer
ranks go on after `place.generate`, inside which generator ranks do their part. Never put a marked line behind a
condition that may differ between its ranks.
"""

from spmd_rl.config import RlvrConfig, main


def run(cfg: RlvrConfig) -> None:
    """Train from the newest checkpoint to the last step or a signal."""
    from spmd_rl import sidecar
    from spmd_rl.data import Prompts

    # Validate rows before importing torch, so that a mistake in a row fails within a second.
    prompts = Prompts.load(cfg.data)
    sidecar.check_domains({p.domain for p in (*prompts.train, *prompts.eval)}, cfg.reward)

    from spmd_rl.job import Job
    from spmd_rl.learn import Evaluation, Learner, sample_log
    from spmd_rl.placement import place_ranks

    rows = {"data.train": prompts.train, "data.eval": prompts.eval}
    with Job.open(cfg, rows, prompts, cfg.data.chat_template_kwargs) as job:  # [all]
        place = place_ranks(job)  # [all] who trains and who generates: `placement.mode`
        # A rank that only generates or holds a frozen role; every rank, if the run is over.
        if place.generate:
            place.generate()
            return
        rollouts, publish, world, track = place.rollouts, place.publish, place.world, job.track
        learner = Learner(cfg, place.roles, job.tokenizer.render)
        evaluate = Evaluation.of(cfg)
        saver, start = job.restore(place, rollouts=rollouts, learner=learner)  # [train] and publish
        if start == 0:
            with track.step(0):
                track.add(evaluate(rollouts, world, 0, track.log_eval))  # [train]
        for step in job.steps(start, saver):
            with track.step(step):
                collected = rollouts.collect(step)  # [train] generated and scored, here or by other ranks
                with sample_log.logged(track, collected, learner):  # [train] logs them, even if `prepare` raises
                    batches = learner.prepare(collected)  # [train] advantages, logprobs where they are needed
                track.add(collected.metrics() | learner.update(batches))  # [train]
                track.add(publish(version=step))  # [train] verified
                track.add(evaluate(rollouts, world, step, track.log_eval))  # [train] when due
                saver.maybe_save(step, last=step == cfg.steps)  # [train]


if __name__ == "__main__":
    main("rlvr", RlvrConfig, run, preview="spmd_rl.tools.dry_run:show")
