"""Reinforcement learning of agents: a policy plays environments over many turns, on every rank from top to bottom.

    torchrun --nproc-per-node 2 -m spmd_rl.agentic +experiment=demo_frozen_lake
    python -m spmd_rl.agentic env.maze.target=my_envs:Maze rollout.max_turns=8 debug=true

Environments run in the CPU processes of a sidecar: while one steps, the engine generates for the others. Marked lines
are collectives, as in `rlvr.py`.
"""

from spmd_rl.config import AgenticConfig, main


def run(cfg: AgenticConfig) -> None:
    """Train from the newest checkpoint to the last step or a signal."""
    from spmd_rl.data import EnvTasks
    from spmd_rl.job import Job
    from spmd_rl.learn import Evaluation, Imitation, Learner, sample_log
    from spmd_rl.placement import place_ranks
    from spmd_rl.rollout import Demonstrations, Demonstrator

    tasks = EnvTasks(cfg.env, cfg.eval.prompts)
    with Job.open(cfg, {"env": tasks.eval}, tasks, cfg.env.chat_template_kwargs, cfg.env) as job:  # [all]
        place = place_ranks(job)  # [all] who trains and who generates: `placement.mode`
        # A rank with `generate` has no part in training.
        if place.generate:
            place.generate()
            return
        rollouts, publish, world, track = place.rollouts, place.publish, place.world, job.track
        expert = Demonstrator(cfg.env, cfg.rollout, cfg.engine.kv_tokens, cfg.seed, place.environments, job.tokenizer)
        demonstrations = Demonstrations(cfg.warmup, tasks, expert, world, rollouts.rest)
        imitation = Imitation.of(cfg, place.roles.policy)
        learner = Learner(cfg, place.roles)
        evaluate = Evaluation.of(cfg)
        saver, start = job.restore(place, rollouts=rollouts, learner=learner)  # [train] and publish
        if start == 0:
            with track.step(0):
                track.add(evaluate(rollouts, world, 0, track.log_eval))  # [train]
        for step in job.steps(start, saver):
            source, student = (demonstrations, imitation) if step <= cfg.warmup.steps else (rollouts, learner)
            with track.step(step):
                collected = source.collect(step)  # [train] played here or by other ranks
                with sample_log.logged(track, collected, student):  # [train] also where the run ends with this step
                    batches = student.prepare(collected)  # [train] credit, logprobs where they are needed
                track.add(collected.metrics() | student.update(batches))  # [train]
                track.add(publish(version=step))  # [train] verified
                track.add(evaluate(rollouts, world, step, track.log_eval))  # [train] when due
                saver.maybe_save(step, last=step == cfg.steps)  # [train]


if __name__ == "__main__":
    main("agentic", AgenticConfig, run, preview="spmd_rl.tools.dry_run_agent:show")
