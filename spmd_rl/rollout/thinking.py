r"""The episode of `rollout.thinking_budget`: closes thoughts that exceed a number of tokens.

    answer = 400 sampled tokens, "\n</think>\n\n", sampled tokens

The inserted text is a prompt between two turns of one answer, so it is never trained on. Budget forcing: s1 (arXiv
2501.19393); the closing tag at a limit: Qwen3 (arXiv 2505.09388, section 4.3).
"""

from array import array

from spmd_rl.base.errors import UserError
from spmd_rl.config.sections.rollout import SamplingConfig
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout.episode import Context, Episode, SoftLimit
from spmd_rl.types import Sample


def thinking(settings: SamplingConfig, tokenizer: Tokenizer) -> Episode:
    """Return an episode of one answer. UserError if the budget leaves no room for it."""
    budget, end_text, tag = settings.thinking_budget, settings.thinking_end_text, settings.thinking_tag
    end, tag_ids = tokenizer.encode(end_text), tokenizer.encode(tag)
    left = settings.max_new_tokens - budget - len(end)
    if left < 1:
        raise UserError(
            f"rollout.thinking_budget: {budget} and {len(end)} tokens of rollout.thinking_end leave nothing of "
            f"rollout.max_new_tokens={settings.max_new_tokens} for the answer"
        )

    def has_ended(token_ids: array) -> bool:
        # A special token is missing in decoded text, so its id is looked for.
        alone = len(tag_ids) == 1 and tag_ids[0] in token_ids
        return alone or tag in tokenizer.decode(token_ids)

    async def think_and_answer(ctx: Context) -> Sample | list[Sample]:
        turn = await ctx.generate(ctx.render(ctx.prompt.messages), SoftLimit(budget, has_ended))
        text = turn.text
        if turn.finish_reason == "length" and len(turn.token_ids) == budget and not has_ended(turn.token_ids):
            text += end_text + (await ctx.generate(end, max_new_tokens=left)).text
        return ctx.sample(await ctx.score(text))

    return think_and_answer
