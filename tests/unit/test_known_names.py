"""The names of TRL, verl and ROLL lead to settings that exist."""

import re

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.config.keys import leaves
from spmd_rl.config.known_names import ABSENT, RENAMED, hint
from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig

KEYS = {leaf.key for leaf in leaves(RlvrConfig)}
SECTIONS = {key.split(".")[0] for key in KEYS}


@pytest.mark.parametrize("text", sorted({*RENAMED.values(), *ABSENT.values()}))
def test_every_setting_that_is_named_exists(text):
    for word in re.findall(r"[a-z_]+\.[a-z_.<>]*[a-z_]", text):
        assert word in KEYS or word.split(".")[0] not in SECTIONS, word


def test_no_name_of_theirs_is_one_of_ours():
    assert not {*RENAMED, *ABSENT} & KEYS
    assert not RENAMED.keys() & ABSENT.keys()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("learning_rate", "here it is policy.lr"),
        ("policy.learning_rate", "here it is policy.lr"),
        ("rollout.n", "here it is rollout.answers_per_prompt"),
        ("actor_rollout_ref.rollout.n", "here it is rollout.answers_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr", "here it is policy.lr"),
        ("critic.optim.lr", "here it is critic.lr"),
        ("num_generations", "here it is rollout.answers_per_prompt"),
        ("max_completion_length", "here it is rollout.max_new_tokens"),
        ("data.max_response_length", "here it is rollout.max_new_tokens"),
        ("beta", "here it is algorithm.kl_coef"),
        ("policy.optim", "here it is policy.optimizer"),
        ("actor_rollout_ref.actor.optim.betas", "here it is policy.betas"),
        ("train.gradient_accumulation_steps", "there is no such setting: gradient accumulation follows from train."),
        ("actor.ppo_epochs", "here it is algorithm.sample_epochs"),
        ("rollout.temprature", "did you mean rollout.temperature?"),
        ("policy.warmup_step", "did you mean policy.warmup_steps?"),
        ("lr", "did you mean policy.lr?"),
        ("algorithm.kl_coeff", "did you mean algorithm.kl_coef?"),
        ("repetition_penalty", "there is no such setting: answers are sampled without penalties"),
        ("rollout.presence_penalty", "there is no such setting: answers are sampled without penalties"),
        ("policy.attn", "there is no such setting: attention in training is torch's own"),
        ("policy.attn_implementation", "there is no such setting: attention in training is torch's own"),
        ("actor.fsdp_config.fsdp_size", "there is no such setting: ranks / train.tp / train.dp_replicate"),
        ("pipeline_model_parallel_size", "here it is train.pp"),
        ("actor.megatron.virtual_pipeline_model_parallel_size", "here it is train.vpp"),
        ("disable_dropout", "there is no such setting: models are trained without dropout"),
        ("data.return_raw_chat", "there is no such setting: not needed: prompts stay messages"),
        ("reward_model.enable", "here it is reward.<domain>.target=rewards.reward_model:ModelReward"),
        ("top_entropy_quantile", "there is no such setting: tokens are not selected by entropy"),
        ("use_liger_kernel", "there is no such setting: not needed: logits are never whole"),
        ("rollout.log_prob_micro_batch_size_per_gpu", "there is no such setting: train.tokens_per_microbatch"),
        ("rollout.enable_chunked_prefill", "here it is engine.args={enable_chunked_prefill: true}, with engine=vllm"),
        ("engine.dp", "there is no such setting: engine.tp x engine.pp generator ranks form a replica"),
        ("engine.ep", "there is no such setting: an engine's ranks have a part of each expert (engine.tp)"),
        ("warmup.batch", "here it is warmup.episodes"),
        ("foo.bar", "--help lists all"),
    ],
)
def test_the_hint_on_an_unknown_key(key, words):
    with pytest.raises(UserError) as caught:
        load("rlvr", RlvrConfig, [f"{key}=1"])
    assert str(caught.value).startswith(f"{key}: unknown key; {words}")


def test_a_name_of_nobody_has_no_hint():
    assert hint("rollout.tempo") is None
