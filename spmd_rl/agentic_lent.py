"""`spmd_rl.agentic` with `placement.mode=lent`: all ranks play, and some of them leave to train.

    torchrun --nproc-per-node 4 -m spmd_rl.agentic +experiment=demo_frozen_lake placement.mode=lent

As `rlvr_lent`, with environments in the place of prompts; the demonstrations of a warm-up are played on the ranks that
train. Lines marked [all] meet all ranks, [train] those that train and [generate] those that do nothing but generate.
"""

from pathlib import Path

from spmd_rl.config import AgenticConfig


def run(cfg: AgenticConfig) -> None:
    """Train for `cfg.steps` steps, or what is left of them."""
    from spmd_rl import sidecar, train
    from spmd_rl.checkpoint import Checkpointer, HfExport, finished
    from spmd_rl.data import EnvTasks
    from spmd_rl.distributed import World, agree_on_dtype, agree_on_start
    from spmd_rl.learn import Imitation, Learner, evaluate, sample_log
    from spmd_rl.model.tokenizer import load_tokenizer
    from spmd_rl.rollout import Agent, Demonstrations
    from spmd_rl.split import Generator, LendingPublisher, Lent, meet
    from spmd_rl.track import Run

    tasks = EnvTasks(cfg.env, cfg.eval.prompts)
    tokenizer = load_tokenizer(cfg.policy.model, cfg.policy.trust_remote_code, cfg.env.chat_template_kwargs)
    with World.open(cfg) as world, world.resources() as stack:  # [all]
        agree_on_start(world, cfg, {"env": tasks.eval})  # [all]
        if done := finished(cfg.checkpoint, Path(cfg.run.dir), cfg.steps, world):  # [all]
            if world.rank == 0:
                print(f"{cfg.run.dir}: already at step {done}; set steps above {done} to continue", flush=True)
            return
        agree_on_dtype(world, cfg)  # [all]
        sides = stack.enter_context(meet(cfg.placement, cfg.sidecar.keys, world))  # [all]
        if side := sides.generate:
            with Generator.build(cfg, tasks, tokenizer, side, world) as generator:  # [generate]
                start, tickets = world.broadcast("start: step", None, src=sides.first_trainer)  # [all]
                generator.run(start, tickets)  # [generate] to the last step
            return
        side = sides.train
        track = stack.enter_context(Run.open(cfg, side.world))  # [train]
        track.announce(0, len(tasks.eval))
        with world.phase("start"), world.journal.slow(cfg.journal.start_seconds):
            host = sidecar.connect_both(cfg.reward, cfg.env, world.node, cfg.sidecar.bind, False, cfg.sidecar.keys)
            scorer, environments = stack.enter_context(host)
            roles = train.build_roles(cfg, side.world)  # [train]
        agent = {"episode": None if cfg.rollout.target else Agent(cfg.env), "environments": environments}
        rollouts = stack.enter_context(Lent.build(cfg, tasks, scorer, tokenizer, side, world, **agent))  # [all]
        publish = LendingPublisher(roles.policy, rollouts.engine, side, world.store, cfg.publish)
        demonstrations = Demonstrations(cfg, tasks, environments, tokenizer, side.world)
        learner, imitation = Learner(cfg, *roles, side.world), Imitation(cfg, roles.policy, side.world)
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
            source, student = (demonstrations, imitation) if step <= cfg.warmup.steps else (rollouts, learner)
            with track.step(step):
                collected = source.collect(step)  # [all] but in the warm-up: play with the others, until it is there
                with sample_log.logged(track, collected, student):  # [train]
                    batches = student.prepare(collected)  # [train] credit, logprobs where they are needed
                track.add(collected.metrics() | student.update(batches))  # [train]
                track.add(publish(version=step))  # [train] verified
                track.add(evaluate(cfg, rollouts, side.world, step, track.log_eval))  # [train] when due
                saver.maybe_save(step, last=step == cfg.steps)  # [train]
