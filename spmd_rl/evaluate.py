"""Evaluation of a model, a checkpoint or a run's newest step, on rows or environments; nothing is trained.

    torchrun --nproc-per-node 8 -m spmd_rl.evaluate policy.model=runs/rlvr/NAME data=jsonl_math data.eval=test.jsonl
    python -m spmd_rl.evaluate +experiment=demo eval.answers=8

Each answer is written as soon as it is scored, so a killed evaluation resumes. Lines marked [all] are collectives, as
in `rlvr.py`.
"""

from spmd_rl.config import EvaluateConfig, main


def run(cfg: EvaluateConfig) -> None:
    """Evaluate the answers that have no score yet."""
    from contextlib import closing
    from pathlib import Path

    from spmd_rl import sidecar
    from spmd_rl.config.run_identity import answers_key
    from spmd_rl.data import EnvTasks, Prompts

    # Validate rows before importing torch, so that a mistake in a row fails within a second.
    source = EnvTasks(cfg.env, cfg.eval.prompts) if cfg.envs else Prompts.load(cfg.data, trains=False)
    if not cfg.envs:
        sidecar.check_domains({prompt.domain for prompt in source.eval}, cfg.reward)
    section = cfg.envs or cfg.data

    from spmd_rl.base.errors import tell
    from spmd_rl.job import Job
    from spmd_rl.learn import Evaluation, val_metrics
    from spmd_rl.placement import place_ranks
    from spmd_rl.rollout import KeptAnswers, KeptRollouts
    from spmd_rl.track.results import table, write_results

    with Job.open(cfg, {"data.eval": source.eval}, source, section.chat_template_kwargs, cfg.envs) as job:  # [all]
        job.verify("policy.model", cfg.policy.checkpoint)  # [all]
        place, directory = place_ranks(job), Path(cfg.run.dir)  # [all] all ranks generate
        job.begin(place, 0)  # [all] the weights are published, verified and probed
        key = job.world.broadcast("eval: key", answers_key(cfg, place.rollouts.prompts.fingerprint()))  # [all]
        with closing(KeptAnswers(directory / "answers" / key, job.world)) as kept, job.track.step(0):  # [all]
            rollouts = KeptRollouts(place.rollouts, kept)
            found = Evaluation.of(cfg).results(rollouts, job.world, 0, job.track.log_eval)  # [all]
            job.track.add(val_metrics(found))
        model = cfg.policy.checkpoint or cfg.policy.model
        about = {"model": model, "base": cfg.policy.model, "answers": cfg.eval.answers, "key": key}
        if job.world.rank == 0:
            write_results(directory, found, about)
            tell(table(found), lines=True)


if __name__ == "__main__":
    main("evaluate", EvaluateConfig, run)
