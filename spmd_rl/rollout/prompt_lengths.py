"""Check of prompts before the first step: their length, and if their reward can judge them."""

from spmd_rl.base.errors import UserError, tell
from spmd_rl.config.schema import DataConfig, RewardsConfig, RolloutConfig
from spmd_rl.data import Prompts
from spmd_rl.distributed import World
from spmd_rl.model.tokenizer import Tokenizer, render_prompt
from spmd_rl.sidecar.support import counted, find_unsupported, may_refuse


def fit_prompts(
    prompts: Prompts,
    tokenizer: Tokenizer,
    rollout: RolloutConfig,
    data: DataConfig,
    reward: RewardsConfig,
    world: World,
) -> tuple[Prompts, int, str]:
    """[all] Return the usable prompts, the length in tokens of the longest, and its id; equal on all ranks.

    Rows that their reward cannot judge are dropped, with a message; so are prompts over `rollout.max_prompt_tokens`
    with `data.overlong=drop`. UserError if one is too long and `data.overlong` is `error`, or if no training prompt is
    left (in an evaluation, no held-out one).
    """
    prompts = _drop_unsupported(prompts, reward, world)  # [all]
    limit, everything = rollout.max_prompt_tokens, (*prompts.train, *prompts.eval)
    mine = range(world.rank, len(everything), world.size)
    lengths = [(len(render_prompt(tokenizer, everything[i])), i) for i in mine]
    fitting = max(([length, everything[i].id] for length, i in lengths if length <= limit), default=[0, ""])
    found = world.gather("start: prompt lengths", [fitting, [[n, i] for n, i in lengths if n > limit]])  # [all]
    (longest, prompt_id), overlong = max(best for best, _ in found), [item for _, theirs in found for item in theirs]
    if not overlong:
        return prompts, longest, prompt_id
    most, index = max(overlong)
    if data.overlong == "error":
        raise UserError(
            f"rollout.max_prompt_tokens={limit}: prompt {everything[index].id} has {most} tokens, and "
            f"{len(overlong) - 1} other prompts are too long; data.overlong=drop leaves them out"
        )
    indices = {index for _, index in overlong}
    num_train = sum(index < len(prompts.train) for index in indices)
    counts = [("training", num_train, len(prompts.train)), ("held-out", len(indices) - num_train, len(prompts.eval))]
    counts = [(kind, dropped, of) for kind, dropped, of in counts if of]
    kind, dropped, of = counts[0]
    if dropped == of:
        raise UserError(
            f"rollout.max_prompt_tokens={limit}: all {of} {kind} prompts are longer, the shortest has "
            f"{min(length for length, index in overlong if index < of)} tokens"
        )
    if world.rank == 0:
        tell(
            f"warning: data.overlong=drop: left out {' and '.join(f'{n} of {of} {kind}' for kind, n, of in counts)} "
            f"prompts, which are longer than rollout.max_prompt_tokens={limit} (the longest has {most} tokens)"
        )
    return prompts.without(indices), longest, prompt_id


def _drop_unsupported(prompts: Prompts, reward: RewardsConfig, world: World) -> Prompts:
    """[all] Drop rows that their reward cannot judge."""
    if not any(may_refuse(domain, one) for domain, one in reward.domains.items()):
        return prompts
    everything = list(enumerate((*prompts.train, *prompts.eval)))
    mine = find_unsupported(everything[world.rank :: world.size], reward.domains)
    found = [item for theirs in world.gather("start: rows", mine) for item in theirs]  # [all]
    if not found:
        return prompts
    train = [reason for index, reason in found if index < len(prompts.train)]
    told = (
        f"{len(train)} of {len(prompts.train)} training rows and {len(found) - len(train)} of {len(prompts.eval)} "
        f"held-out ones are left out, because their reward cannot judge them: {counted(reason for _, reason in found)}"
    )
    if len(train if prompts.train else found) == len(prompts.train or prompts.eval):
        raise UserError(told)
    if world.rank == 0:
        tell(told)
    return prompts.without({index for index, _ in found})


def check_room(s: RolloutConfig, kv_tokens: int, length: int, prompt_id: str, room: int) -> None:
    """Raise UserError if an answer to the longest prompt exceeds the engine's `room` in tokens.

    prompt_id: of the prompt of this `length`; empty if only a limit is known.
    """
    key, needed = f"rollout.max_new_tokens={s.max_new_tokens}: with a prompt of {length} tokens it", length
    if s.max_context_tokens is None:
        needed += s.max_new_tokens
    else:
        key, needed = f"rollout.max_context_tokens={s.max_context_tokens}: it", s.max_context_tokens
        if length >= needed:
            prompt = f"prompt {prompt_id} of" if prompt_id else "a prompt of rollout.max_prompt_tokens ="
            raise UserError(f"{key} leaves no room to answer {prompt} {length} tokens")
    if needed > room:
        raise UserError(f"{key} exceeds the {room} that fit (engine.kv_tokens={kv_tokens}, and the model's own limit)")
