"""`spmd_rl.agentic` with `placement.mode=overlapped`: environments reply while their policy is updated.

    torchrun --nproc-per-node 2 -m spmd_rl.agentic +experiment=demo_frozen_lake placement.mode=overlapped

As `rlvr_overlapped`, with environments in the place of prompts: a trajectory may have turns of two policies, one step
apart. Lines marked [all] meet the other ranks; no other line may decide whether one of them is reached.
"""

from contextlib import closing
from pathlib import Path

from spmd_rl.config import AgenticConfig


def run(cfg: AgenticConfig) -> None:
    """Train for `cfg.steps` steps, or what is left of them."""
    from spmd_rl import engine, sidecar, sync, train
    from spmd_rl.checkpoint import Checkpointer, HfExport, finished
    from spmd_rl.data import EnvTasks
    from spmd_rl.distributed import World, agree_on_dtype, agree_on_start
    from spmd_rl.learn import Imitation, Learner, evaluate, sample_log
    from spmd_rl.model.tokenizer import load_tokenizer
    from spmd_rl.rollout import Agent, Demonstrations, Rollouts
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
        train_world = world.subset("train", range(world.size))  # [all] every rank trains ...
        generate_world = world.subset("generate", range(world.size))  # [all] ... and generates
        track = stack.enter_context(Run.open(cfg, world))  # [all]
        track.announce(0, len(tasks.eval))
        with world.phase("start"), world.journal.slow(cfg.journal.start_seconds):
            scorer, environments = stack.enter_context(
                sidecar.connect_both(cfg.reward, cfg.env, world.node, cfg.sidecar.bind, cfg.debug, cfg.sidecar.keys)
            )
            roles = train.build_roles(cfg, train_world)  # [all]
            generator = engine.build(cfg, generate_world)  # [all]
        publish = sync.build(roles.policy, generator, world, cfg.publish.probe_every)
        agent = None if cfg.rollout.target else Agent(cfg.env)
        rollouts = Rollouts(cfg, generator, tasks, scorer, tokenizer, world, agent, environments)  # [all]
        stack.enter_context(closing(rollouts))
        demonstrations = Demonstrations(cfg, tasks, environments, tokenizer, world)
        learner, imitation = Learner(cfg, *roles, world), Imitation(cfg, roles.policy, world)
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
            source, student = (demonstrations, imitation) if step <= cfg.warmup.steps else (rollouts, learner)
            with track.step(step):
                collected = source.collect(step)  # [all] what was begun of it, and the turns that replies ask for
                if cfg.warmup.steps < step < cfg.steps and not collected.failure:
                    rollouts.begin(step + 1)  # [all] replies come in during the update
                with sample_log.logged(track, collected, student):  # [all] also where the run ends with this step
                    batches = student.prepare(collected)  # [all] credit, logprobs where they are needed
                track.add(collected.metrics() | student.update(batches))  # [all]
                track.add(publish(version=step))  # [all] verified
                track.add(evaluate(cfg, rollouts, world, step, track.log_eval))  # [all] when due
                saver.maybe_save(step, last=step == cfg.steps)  # [all]
        generator.close()  # not with an exception pending: an engine's own groups may wait for other ranks
