"""`spmd_rl.agentic` with `placement.generate=attached`: all ranks of this job train, and jobs of their own play.

    torchrun --standalone -m spmd_rl.agentic +experiment=demo_frozen_lake placement.mode=split \
        placement.generate=attached                            # and as many as there are with placement.attach=auto

As `rlvr_attached`, with environments in the place of prompts; the demonstrations of a warm-up are played on the ranks
that train. Lines marked [all] meet the other ranks.
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
    from spmd_rl.rollout import Demonstrations
    from spmd_rl.split import CrewPublisher, HandedIn, serve_attached
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
        track = stack.enter_context(Run.open(cfg, world))  # [all]
        track.announce(0, len(tasks.eval))
        side = stack.enter_context(serve_attached(cfg, {"data": tasks.fingerprint()}, world))  # [all]
        with world.phase("start"), world.journal.slow(cfg.journal.start_seconds):
            host = sidecar.connect_both(cfg.reward, cfg.env, world.node, cfg.sidecar.bind, False, cfg.sidecar.keys)
            _, environments = stack.enter_context(host)
            roles = train.build_roles(cfg, world)  # [all]
        rollouts = HandedIn(cfg, tasks, tokenizer, side)  # [all]
        publish = CrewPublisher(rollouts, roles.policy, side, world.store, cfg.publish)
        demonstrations = Demonstrations(cfg, tasks, environments, tokenizer, world)
        learner, imitation = Learner(cfg, *roles, world), Imitation(cfg, roles.policy, world)
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
            source, student = (demonstrations, imitation) if step <= cfg.warmup.steps else (rollouts, learner)
            with track.step(step):
                collected = source.collect(step)  # [all] played on other ranks meanwhile
                with sample_log.logged(track, collected, student):  # [all]
                    batches = student.prepare(collected)  # [all] credit, logprobs where they are needed
                track.add(collected.metrics() | student.update(batches))  # [all]
                track.add(publish(version=step))  # [all] verified
                track.add(evaluate(cfg, rollouts, world, step, track.log_eval))  # [all] when due
                saver.maybe_save(step, last=step == cfg.steps)  # [all]
