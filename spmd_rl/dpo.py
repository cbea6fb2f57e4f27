"""Learning from preferences (DPO, IPO, SimPO, KTO): one program that every rank runs from top to bottom.

    torchrun --nproc-per-node 2 -m spmd_rl.dpo +experiment=demo_dpo
    python -m spmd_rl.dpo data.train=pairs.jsonl epochs=1 policy.lr=1e-6 preference.beta=0.1

Lines marked [all] are collectives, as in `rlvr.py`.
"""

from pathlib import Path

from spmd_rl.config import DpoConfig, main


def run(cfg: DpoConfig) -> None:
    """Train for `cfg.steps` steps or `cfg.epochs`, from the newest checkpoint if any."""
    from spmd_rl.data import Examples

    # Validate rows before importing torch, so that a mistake in a row fails within a second.
    examples = Examples.load(cfg.data, cfg.row_kind)
    end = cfg.count_rows(len(examples.train))

    from spmd_rl.job import Job
    from spmd_rl.learn import Preference, keep_reference, sample_log
    from spmd_rl.rollout import RowSource

    with Job.open(cfg, examples.digests, examples, cfg.data.chat_template_kwargs) as job:  # [all]
        if job.is_over:
            return
        place, track = job.train(), job.track  # [all]
        judged = cfg.preference.is_judged
        rows = RowSource(examples, cfg.data, cfg.eval, job.tokenizer.pieces, job.world, cfg.seed, end, judged)
        if place.roles.reference:
            digest = examples.identity(cfg)
            keep_reference(rows, place.roles.reference, cfg.steps, Path(cfg.run.dir, "reference.safetensors"), digest)
        student = Preference(cfg.preference, place.roles.policy, cfg.train.updates_per_step)
        log = sample_log.of_rows(track, rows)
        saver, start = job.restore(place, rows=rows)  # [all]
        if start == 0:
            with track.step(0):
                track.add(student.measure(rows.held_out(0, cfg.steps), log))  # [all]
        for step in job.steps(start, saver):
            with track.step(step):
                collected = rows.collect(step)  # [all]
                track.add(rows.metrics(collected) | student.update(student.prepare(collected)))  # [all]
                track.add(student.measure(rows.held_out(step, cfg.steps), log))  # [all] when due
                saver.maybe_save(step, last=step == cfg.steps)  # [all]


if __name__ == "__main__":
    main("dpo", DpoConfig, run, preview="spmd_rl.tools.dry_run_rows:show")
