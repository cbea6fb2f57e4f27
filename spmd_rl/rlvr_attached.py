"""`spmd_rl.rlvr` with `placement.generate=attached`: all ranks of this job train, and jobs of their own generate.

    torchrun --standalone -m spmd_rl.rlvr +experiment=demo placement.mode=split placement.generate=attached
    torchrun --standalone -m spmd_rl.rlvr +experiment=demo placement.mode=split placement.generate=attached \
        placement.attach=auto                                  # `rlvr_crew.py`: as many such jobs as there are

This is the loop of the job that trains. An attached job may die at any moment, and another may come: training waits
for what it lacks, and no longer. Lines marked [all] meet the other ranks.
"""

from pathlib import Path

from spmd_rl.config import RlvrConfig


def run(cfg: RlvrConfig) -> None:
    """Train for `cfg.steps` steps, or what is left of them."""
    from spmd_rl import sidecar
    from spmd_rl.data import Prompts

    prompts = Prompts.load(cfg.data, cfg.steps > 0)  # before torch: a mistake in a row is told within a second
    sidecar.check_domains({p.domain for p in (*prompts.train, *prompts.eval)}, cfg.reward)

    from spmd_rl import train
    from spmd_rl.checkpoint import Checkpointer, HfExport, finished
    from spmd_rl.distributed import World, agree_on_dtype, agree_on_start
    from spmd_rl.learn import Learner, evaluate, sample_log
    from spmd_rl.model.tokenizer import load_tokenizer
    from spmd_rl.split import CrewPublisher, HandedIn, serve_attached
    from spmd_rl.track import Run

    tokenizer = load_tokenizer(cfg.policy.model, cfg.policy.trust_remote_code, cfg.data.chat_template_kwargs)
    with World.open(cfg) as world, world.resources() as stack:  # [all]
        agree_on_start(world, cfg, {"data.train": prompts.train, "data.eval": prompts.eval})  # [all]
        if done := finished(cfg.checkpoint, Path(cfg.run.dir), cfg.steps, world):  # [all]
            if world.rank == 0:
                print(f"{cfg.run.dir}: already at step {done}; set steps above {done} to continue", flush=True)
            return
        agree_on_dtype(world, cfg)  # [all]
        track = stack.enter_context(Run.open(cfg, world))  # [all]
        track.announce(len(prompts.train), len(prompts.eval))
        side = stack.enter_context(serve_attached(cfg, {"data": prompts.fingerprint()}, world))  # [all]
        with world.phase("start"), world.journal.slow(cfg.journal.start_seconds):
            roles = train.build_roles(cfg, world)  # [all]
        rollouts = HandedIn(cfg, prompts, tokenizer, side)  # [all]
        publish = CrewPublisher(rollouts, roles.policy, side, world.store, cfg.publish)
        learner = Learner(cfg, *roles, world)
        parts = {"rollouts": rollouts, "learner": learner, "track": track}
        export = HfExport(roles.policy, cfg.policy.model, world)
        saver = Checkpointer(cfg.checkpoint, Path(cfg.run.dir), world, roles.trained, parts, export)  # [all]

        start = saver.restore()  # [all] 0 for a fresh run
        rollouts.begin(start)  # [all] once `placement.min_generate` ranks are there
        publish(version=start)  # [all] verified
        if start == 0:
            with track.step(0):
                track.add(evaluate(cfg, rollouts, world, 0, track.log_eval))  # [all]
        for step in range(start + 1, cfg.steps + 1):
            with track.step(step):
                collected = rollouts.collect(step)  # [all] made by attached jobs meanwhile
                with sample_log.logged(track, collected, learner):  # [all]
                    batches = learner.prepare(collected)  # [all] advantages, logprobs where they are needed
                track.add(collected.metrics() | learner.update(batches))  # [all]
                track.add(publish(version=step))  # [all] verified
                track.add(evaluate(cfg, rollouts, world, step, track.log_eval))  # [all] when due
                saver.maybe_save(step, last=step == cfg.steps)  # [all]
