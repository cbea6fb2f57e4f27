"""Arithmetic of a step: prompts, answers, samples and tokens. Torch-free."""

from spmd_rl.base.errors import plural
from spmd_rl.config.placement import Placement
from spmd_rl.config.ranks import world_size
from spmd_rl.config.sections.algorithm import AlgorithmConfig
from spmd_rl.config.sections.data import SourcesConfig
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.env import EnvsConfig
from spmd_rl.config.sections.models import TrainConfig
from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.config.sections.rollout import EvaluationConfig, RolloutConfig, SamplingConfig
from spmd_rl.config.sections.rows import RowsConfig, ValidationConfig


def describe_batch(
    rollout: RolloutConfig,
    train: TrainConfig,
    engine: EngineConfig,
    placement: PlacementConfig,
    env: EnvsConfig | None = None,
    algorithm: AlgorithmConfig | None = None,
) -> list[tuple[str, str]]:
    """Return a step's arithmetic as names and texts."""
    samples = rollout.prompts_per_step * rollout.answers_per_prompt
    # Training and generation may use different ranks, so shards and replicas are counted apart.
    ranks, turns = Placement.of(placement, world_size()), has_turns(rollout, plays=env is not None)
    shards, replicas = max(1, len(ranks.train) // train.ranks_per_shard), max(1, len(ranks.generate) // engine.tp)
    running, epochs = replicas * engine.max_running, algorithm.sample_epochs if algorithm else 1
    return [
        ("step", describe_samples(rollout)),
        ("generation", f"{plural(replicas, 'engine')}, up to {running} answers at once ({engine.max_running} each)"),
        (
            "training",
            f"{plural(shards, 'data shard')} of about {samples / shards:.4g} samples, "
            f"{plural(epochs * train.updates_per_step, 'optimizer step')} a step on about "
            f"{samples / train.updates_per_step:.4g} samples each",
        ),
        ("tokens", f"{describe_tokens(rollout, turns)}, {train.tokens_per_microbatch:,} a micro-batch"),
    ]


def describe_rows(
    num_train: int, num_eval: int, data: RowsConfig, eval: ValidationConfig, train: TrainConfig, steps: int
) -> list[tuple[str, str]]:
    """Return a supervised run's arithmetic, on `num_train` rows, as names and texts."""
    shards, size = max(1, world_size() // train.ranks_per_shard), data.rows_per_step
    epochs, asked = steps * size / num_train, min(num_eval, eval.rows or num_eval)
    updates = plural(train.updates_per_step, "optimizer step")
    evaluation = f"{asked} of {num_eval} held-out rows every {eval.every} steps" if asked and eval.every else "none"
    if evaluation != "none" and data.overlong == "drop":
        evaluation += f", without those longer than {data.max_tokens} tokens (val/overlong)"
    return [
        ("rows", f"{num_train} for training ({epochs:.3g} epochs), {describe_held_out(num_eval, data)}"),
        ("step", f"{size} rows of at most {data.max_tokens} tokens, {updates}"),
        ("training", f"{plural(shards, 'data shard')}, {train.tokens_per_microbatch:,} tokens a micro-batch"),
        ("evaluation", evaluation),
    ]


def describe_held_out(num_eval: int, data: SourcesConfig | None) -> str:
    """Return text on held-out rows and their source."""
    taken = data is not None and data.train and not data.eval and num_eval
    return f"{num_eval} held out" + (f" of data.train (data.holdout={data.holdout:g})" if taken else "")


def describe_evaluation(eval: EvaluationConfig, steps: int, num_eval: int) -> str:
    """Return text on held-out prompts: number, sampling, times."""
    asked = num_eval if eval.prompts is None else min(eval.prompts, num_eval)
    if not eval.every or not asked:
        return "none"
    often = f"every {eval.every} steps" if steps else "once, and nothing is trained"
    return f"{asked} of {num_eval} held-out prompts x ({eval.answers} sampled, 1 greedy) {often}"


def describe_tokens(rollout: RolloutConfig, turns: bool, prompt_tokens: int | None = None) -> str:
    """Return text on the most tokens of a sample and of a step.

    turns: see `has_turns`; without `rollout.max_context_tokens` only one turn is bounded. prompt_tokens: of the longest
    prompt, if known.
    """
    prompt = rollout.max_prompt_tokens if prompt_tokens is None else prompt_tokens
    longest, samples = tokens_per_turn(rollout, prompt), rollout.prompts_per_step * rollout.answers_per_prompt
    parts = f"{prompt} prompt + {rollout.max_new_tokens} answer"
    if rollout.max_context_tokens:
        parts = "rollout.max_context_tokens"
    elif turns:
        return f"at most {longest:,} in the first turn of an episode ({parts}), more with each further one"
    return f"at most {longest:,} a sample ({parts}), {samples * longest:,} a step"


def has_turns(rollout: SamplingConfig, plays: bool) -> bool:
    """Return True if episodes may have several turns. plays: an environment's."""
    return (plays or rollout.target is not None) and rollout.max_turns != 1


def tokens_per_turn(rollout: SamplingConfig, prompt_tokens: int) -> int:
    """Return the most tokens of a prompt and one answer, or of a bounded sample."""
    return rollout.max_context_tokens or prompt_tokens + rollout.max_new_tokens


def describe_samples(rollout: RolloutConfig) -> str:
    """Return text on a step's samples, and further prompts it may start."""
    samples = rollout.prompts_per_step * rollout.answers_per_prompt
    told = f"{rollout.prompts_per_step} prompts x {rollout.answers_per_prompt} answers = {samples} samples"
    if rollout.over_sample:
        told += f"; {rollout.over_sample} prompts more are started"
    if filters := [f"{key}={value}" for key, value in vars(rollout.filter).items() if value not in (None, False)]:
        most = rollout.max_prompts_per_step or 4 * rollout.prompts_per_step
        told += f"; up to {most} prompts where rollout.filter drops groups ({', '.join(filters)})"
    return told
