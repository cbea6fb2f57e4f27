"""`spmd_rl.rlvr` with `placement.mode=lent`: all ranks generate, and some of them leave to train.

    torchrun --nproc-per-node 4 -m spmd_rl.rlvr +experiment=demo placement.mode=lent

As `rlvr_split`, but the ranks that train take part in generating a step from the end of the update before until its
answers are there; the others have begun with it meanwhile, and go on with the next step while they are away. Lines
marked [all] meet all ranks, [train] those that train and [generate] those that do nothing but generate.
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
    from spmd_rl.split import Generator, LendingPublisher, Lent, meet
    from spmd_rl.track import Run

    tokenizer = load_tokenizer(cfg.policy.model, cfg.policy.trust_remote_code, cfg.data.chat_template_kwargs)
    with World.open(cfg) as world, world.resources() as stack:  # [all]
        agree_on_start(world, cfg, {"data.train": prompts.train, "data.eval": prompts.eval})  # [all]
        if done := finished(cfg.checkpoint, Path(cfg.run.dir), cfg.steps, world):  # [all]
            if world.rank == 0:
                print(f"{cfg.run.dir}: already at step {done}; set steps above {done} to continue", flush=True)
            return
        agree_on_dtype(world, cfg)  # [all]
        sides = stack.enter_context(meet(cfg.placement, cfg.sidecar.keys, world))  # [all]
        if side := sides.generate:
            with Generator.build(cfg, prompts, tokenizer, side, world) as generator:  # [generate]
                start, tickets = world.broadcast("start: step", None, src=sides.first_trainer)  # [all]
                generator.run(start, tickets)  # [generate] to the last step
            return
        side = sides.train
        track = stack.enter_context(Run.open(cfg, side.world))  # [train]
        track.announce(len(prompts.train), len(prompts.eval))
        with world.phase("start"), world.journal.slow(cfg.journal.start_seconds):
            judges = sidecar.connect(cfg.reward, world.node, cfg.sidecar.bind, False, cfg.sidecar.keys)
            scorer = stack.enter_context(judges)
            roles = train.build_roles(cfg, side.world)  # [train]
        rollouts = stack.enter_context(Lent.build(cfg, prompts, scorer, tokenizer, side, world))  # [all]
        publish = LendingPublisher(roles.policy, rollouts.engine, side, world.store, cfg.publish)
        learner = Learner(cfg, *roles, side.world)
        parts = {"rollouts": rollouts, "learner": learner, "track": track}
        export = HfExport(roles.policy, cfg.policy.model, side.world)
        saver = Checkpointer(cfg.checkpoint, Path(cfg.run.dir), side.world, roles.trained, parts, export)  # [train]

        start = saver.restore()  # [train] 0 for a fresh run
        world.broadcast("start: step", [start, rollouts.state()], src=sides.first_trainer)  # [all]
        with world.journal.slow(cfg.journal.start_seconds):  # an engine's first step may compile
            publish(version=start)  # [train] verified
        if start == 0:
            with track.step(0):
                track.add(evaluate(cfg, rollouts, side.world, 0, track.log_eval))  # [train]
        for step in range(start + 1, cfg.steps + 1):
            with track.step(step):
                collected = rollouts.collect(step)  # [all] generate with the others, until it is there
                with sample_log.logged(track, collected, learner):  # [train]
                    batches = learner.prepare(collected)  # [train] advantages, logprobs where they are needed
                track.add(collected.metrics() | learner.update(batches))  # [train]
                track.add(publish(version=step))  # [train] verified
                track.add(evaluate(cfg, rollouts, side.world, step, track.log_eval))  # [train] when due
                saver.maybe_save(step, last=step == cfg.steps)  # [train]
