"""Reinforcement learning with verifiable rewards: one program that every rank runs from top to bottom.

    torchrun --nproc-per-node 2 -m spmd_rl.rlvr +experiment=demo rollout.temperature=0.9
    python -m spmd_rl.rlvr +experiment=demo debug=true

Lines marked [all] meet the other ranks; no other line may decide whether one of them is reached.
"""

from contextlib import closing
from pathlib import Path

from spmd_rl.config import RlvrConfig, main


def run(cfg: RlvrConfig) -> None:
    """Train for `cfg.steps` steps, or what is left of them."""
    from spmd_rl import sidecar
    from spmd_rl.data import Prompts

    prompts = Prompts.load(cfg.data, cfg.steps > 0)  # before torch: a mistake in a row is told within a second
    sidecar.check_domains({p.domain for p in (*prompts.train, *prompts.eval)}, cfg.reward)

    from spmd_rl import engine, sync, train
    from spmd_rl.checkpoint import Checkpointer, HfExport, finished
    from spmd_rl.distributed import World, agree_on_dtype, agree_on_start
    from spmd_rl.learn import Learner, evaluate, sample_log
    from spmd_rl.model.tokenizer import load_tokenizer
    from spmd_rl.rollout import Rollouts
    from spmd_rl.track import Run

    tokenizer = load_tokenizer(cfg.policy.model, cfg.policy.trust_remote_code, cfg.data.chat_template_kwargs)
    with World.open(cfg) as world, world.resources() as stack:  # [all]
        agree_on_start(world, cfg, {"data.train": prompts.train, "data.eval": prompts.eval})  # [all]
        if done := finished(cfg.checkpoint, Path(cfg.run.dir), cfg.steps, world):  # [all]
            if world.rank == 0:
                print(f"{cfg.run.dir}: already at step {done}; set steps above {done} to continue", flush=True)
            return
        agree_on_dtype(world, cfg)  # [all]
        train_world = world.subset("train", range(world.size))  # [all] every rank trains ...
        generate_world = world.subset("generate", range(world.size))  # [all] ... and generates
        track = stack.enter_context(Run.open(cfg, world))  # [all]
        track.announce(len(prompts.train), len(prompts.eval))
        with world.phase("start"), world.journal.slow(cfg.journal.start_seconds):
            scorer = stack.enter_context(
                sidecar.connect(cfg.reward, world.node, cfg.sidecar.bind, cfg.debug, cfg.sidecar.keys)
            )
            roles = train.build_roles(cfg, train_world)  # [all]
            generator = engine.build(cfg, generate_world)  # [all]
        publish = sync.build(roles.policy, generator, world, cfg.publish.probe_every)
        rollouts = stack.enter_context(closing(Rollouts(cfg, generator, prompts, scorer, tokenizer, world)))  # [all]
        learner = Learner(cfg, *roles, world)
        parts = {"rollouts": rollouts, "learner": learner, "track": track}
        export = HfExport(roles.policy, cfg.policy.model, world)
        saver = Checkpointer(cfg.checkpoint, Path(cfg.run.dir), world, roles.trained, parts, export)  # [all]

        start = saver.restore()  # [all] 0 for a fresh run
        rollouts.check()
        with world.journal.slow(cfg.journal.start_seconds):  # an engine's first step may compile
            publish(version=start)  # [all] verified
        if start == 0:
            with track.step(0):
                track.add(evaluate(cfg, rollouts, world, 0, track.log_eval))  # [all]
        for step in range(start + 1, cfg.steps + 1):
            with track.step(step):
                collected = rollouts.collect(step)  # [all] generate and score; nobody assigns
                with sample_log.logged(track, collected, learner):  # [all] also where the run ends with this step
                    batches = learner.prepare(collected)  # [all] advantages, logprobs where they are needed
                track.add(collected.metrics() | learner.update(batches))  # [all]
                track.add(publish(version=step))  # [all] verified
                track.add(evaluate(cfg, rollouts, world, step, track.log_eval))  # [all] when due
                saver.maybe_save(step, last=step == cfg.steps)  # [all]
        generator.close()  # not with an exception pending: an engine's own groups may wait for other ranks


if __name__ == "__main__":
    main("rlvr", RlvrConfig, run, preview="spmd_rl.dry_run:show")
