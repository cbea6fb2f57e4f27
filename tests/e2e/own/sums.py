"""Supervised learning on rows of one's own: torchrun --nproc-per-node 2 -m sums policy.lr=1e-3 largest=99."""

from array import array
from dataclasses import dataclass

from spmd_rl.config import PipelineConfig, main


@dataclass
class SumsConfig(PipelineConfig):
    largest: int = 9
    """Largest number that is added."""


def run(cfg: SumsConfig) -> None:
    from spmd_rl import learn
    from spmd_rl.batch import pack
    from spmd_rl.job import Job
    from spmd_rl.types import Sample, Turn, Verdict

    with Job.open(cfg) as job:  # [all]
        if job.is_over:
            return
        place, numbers = job.train(), range(cfg.largest + 1)  # [all]
        policy, encode, texts = place.roles.policy, job.tokenizer.encode, [(a, b) for a in numbers for b in numbers]
        pairs = [(encode(f"{a} + {b} ="), encode(f" {a + b}")) for a, b in texts]
        # An engine would give each token a logprob and a policy version; supervised learning reads neither
        turns = [Turn(p, a, array("f", [0.0] * len(a)), array("i", [0] * len(a)), "stop") for p, a in pairs]
        samples = [Sample(n, 0, (turn,), Verdict("ok", 0.0)) for n, turn in enumerate(turns)]
        batch = pack(samples[policy.layout.data.rank :: policy.layout.data.size])
        batch.weights = batch.loss_mask / sum(len(answer) for _, answer in pairs)
        saver, start = job.restore(place)  # [all]
        for step in job.steps(start, saver):
            with job.track.step(step):
                job.track.add(learn.update(policy, [batch], learn.nll))  # [all]
                saver.maybe_save(step, last=step == cfg.steps)  # [all]


if __name__ == "__main__":
    main("sums", SumsConfig, run)
