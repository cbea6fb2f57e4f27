"""A reward model from pairs of answers, or from labels of answers or of their steps: one program for every rank.

    torchrun --nproc-per-node 2 -m spmd_rl.reward_model +experiment=demo_reward_model
    python -m spmd_rl.reward_model data.train=pairs.jsonl epochs=1 policy.lr=1e-5
    python -m spmd_rl.reward_model head=process data.train=steps.jsonl epochs=1 policy.lr=1e-5

`rewards.reward_model:ModelReward` loads the exported model. Lines marked [all] are collectives, as in `rlvr.py`.
"""

from spmd_rl.config import RewardModelConfig, main


def run(cfg: RewardModelConfig) -> None:
    """Train for `cfg.steps` steps or `cfg.epochs`, from the newest checkpoint if any."""
    from spmd_rl.data import Examples

    # Validate rows before importing torch, so that a mistake in a row fails within a second.
    examples = Examples.load(cfg.data, cfg.row_kind)
    end = cfg.count_rows(len(examples.train))

    from spmd_rl.checkpoint import RewardExport
    from spmd_rl.job import Job
    from spmd_rl.learn import Judging, sample_log
    from spmd_rl.rollout import RowSource

    with Job.open(cfg, examples.digests, examples, cfg.data.chat_template_kwargs) as job:  # [all]
        if job.is_over:
            return
        place, track, tokenizer = job.train(), job.track, job.tokenizer  # [all]
        rows = RowSource(examples, cfg.data, cfg.eval, tokenizer.scored_pieces, job.world, cfg.seed, end)
        critic = place.roles.critic
        student = Judging.of(cfg, critic)
        export = RewardExport(critic, cfg.policy.model, job.world, tokenizer.pad_id, cfg.separator)
        log = sample_log.of_rows(track, rows)
        saver, start = job.restore(place, export, rows=rows)  # [all]
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
    main("reward_model", RewardModelConfig, run, preview="spmd_rl.tools.dry_run_rows:show")
