"""Names of settings in TRL, verl and ROLL, for the hint on an unknown key.

    hint("actor_rollout_ref.rollout.n")  # 'here it is rollout.answers_per_prompt'

Last parts are matched: `actor_rollout_ref.actor.optim.lr` is found as `optim.lr`.
"""

from collections.abc import Mapping
from typing import Any

_THEIRS = {
    # the model and its optimizer
    "policy.lr": "learning_rate actor.lr optim.lr",
    "critic.lr": "critic.optim.lr",
    "policy.schedule": "lr_scheduler_type lr_scheduler",
    "policy.warmup_steps": "lr_warmup_steps warmup_steps",
    "policy.max_grad_norm": "max_grad_norm grad_clip clip_grad",
    "policy.weight_decay": "weight_decay",
    "policy.optimizer": "optimizer optim",
    "policy.betas": "optim.betas",
    "policy.eps": "adam_epsilon",
    "policy.lora.rank": "lora_rank lora_r",
    "policy.lora.alpha": "lora_alpha",
    "policy.lora.targets": "target_modules lora_target_modules",
    "policy.lora.dropout": "lora_dropout",
    "policy.lora.rslora": "use_rslora",
    "policy.lora.dora": "use_dora",
    "policy.betas=[...]": "adam_beta1 adam_beta2",
    "policy.model": "model_name_or_path model_name model.path pretrain",
    "reward.<domain>.args (rewards.reward_model)": "reward_pretrain reward_model.path",
    "policy.trust_remote_code": "trust_remote_code",
    "policy.dtype=bfloat16": "bf16",
    "policy.dtype": "fp16 torch_dtype dtype",
    "eval.every": "eval_strategy eval_steps test_freq",
    "eval.every, which evaluates before the first step too; 0 never does": "val_before_train eval_on_start",
    # steps and batches
    "steps": "max_steps total_training_steps",
    "warmup.episodes": "warmup.batch",
    "rollout.answers_per_prompt": "num_generations rollout.n group_size num_return_sequences_in_group",
    "rollout.prompts_per_step": "train_batch_size rollout_batch_size",
    "rollout.prompts_per_step with rollout.over_sample": "gen_batch_size",
    "rollout.max_prompts_per_step": "max_num_gen_batches",
    "train=fsdp2, train=deepspeed or train=megatron": "strategy",
    "train=deepspeed and train.stage": "deepspeed zero_stage",
    "train.tokens_per_microbatch": "ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu",
    "train.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "engine.tp (train.tp for training)": "tensor_model_parallel_size tensor_parallel_size",
    "train.ep": "expert_model_parallel_size expert_parallel_size",
    "train.cp": "ulysses_sequence_parallel_size context_parallel_size",
    "train.pp": "pipeline_model_parallel_size pipeline_parallel_size",
    "train.vpp": "virtual_pipeline_model_parallel_size",
    "train.vpp, the number of chunks of a stage": "num_layers_per_virtual_pipeline_stage",
    "policy.router_aux_coef": "router_aux_loss_coef moe_aux_loss_coeff",
    "policy.router_bias_update_speed": "moe_router_bias_update_rate load_balance_coeff",
    "policy.router_replay": "use_rollout_routing_replay enable_rollout_routing_replay",
    "engine.tp": "vllm_tensor_parallel_size",
    "engine.pp": "vllm_pipeline_parallel_size",
    "train.dp_replicate": "dp_replicate_degree data_parallel_replicate_degree dp_replicate_size",
    "train.offload": "param_offload optimizer_offload",
    "train.compile": "torch_compile use_torch_compile",
    "engine=vllm": "use_vllm",
    "engine.args={enforce_eager: true}, with engine=vllm": "enforce_eager",
    "engine.args={max_num_batched_tokens: N}, with engine=vllm": "max_num_batched_tokens",
    "engine.name": "rollout.name",
    "engine.args={enable_chunked_prefill: true}, with engine=vllm": "enable_chunked_prefill",
    "engine.max_running": "max_num_seqs",
    # generation
    "rollout.max_new_tokens": "max_completion_length max_response_length response_length max_tokens generate_max_len",
    "rollout.max_prompt_tokens": "max_prompt_length prompt_length prompt_max_len",
    "rollout.max_context_tokens": "max_model_len vllm_max_model_len sequence_length",
    "rollout.max_turns": "max_assistant_turns max_actions_per_traj",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "rollout.top_k": "top_k",
    "rollout.constraint.regex": "vllm_structured_outputs_regex vllm_guided_decoding_regex",
    "rollout.min_p": "min_p",
    "rollout.stop, a list": "stop_strings",
    "rollout.answers_per_prompt, answers that are sampled; there is no beam search": "num_beams",
    "eval.temperature": "val_kwargs.temperature",
    "eval.answers": "val_kwargs.n",
    "rollout.filter.zero_variance": "filter_groups.enable",
    # the algorithm
    "algorithm=<recipe> or algorithm.advantage": "adv_estimator",
    "algorithm=<recipe> or algorithm.loss_agg": "loss_type",
    "algorithm.loss": "pg_variant loss_mode",
    "algorithm.loss_agg": "loss_agg_mode",
    "algorithm.norm_std": "scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.norm_std_type": "whiten_rewards",
    "algorithm.kl_coef": "beta kl_loss_coef",
    "algorithm.kl_reward_coef": "init_kl_coef kl_ctrl.kl_coef",
    "algorithm.kl_reward_coef, above 0": "use_kl_in_reward",
    "algorithm.kl_coef, above 0": "use_kl_loss",
    "algorithm.kl_estimator": "kl_loss_type",
    "algorithm.kl_reward_estimator": "kl_penalty",
    "algorithm.clip_low and algorithm.clip_high": "epsilon cliprange clip_ratio pg_clip",
    "algorithm.clip_high": "epsilon_high clip_ratio_high",
    "algorithm.clip_low": "clip_ratio_low",
    "algorithm.dual_clip": "clip_ratio_c delta",
    "algorithm=gspo, for one ratio a sequence": "importance_sampling_level",
    "algorithm.loss=dual_clip": "dual_clip_loss",
    "algorithm.value_clip": "cliprange_value",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef",
    "algorithm.lam": "lambd",
    "algorithm.max_len_mask": "mask_truncated_completions",
    "algorithm.overlong_tokens": "overlong_buffer.len",
    "algorithm.overlong_coef": "overlong_buffer.penalty_factor",
    "algorithm.correction.level=token": "vllm_importance_sampling_correction",
    "algorithm.correction.upper": "vllm_importance_sampling_cap tis_imp_ratio_cap",
    "algorithm.critic_warmup": "critic_warmup",
    "reference.sync_steps": "sync_ref_model ref_model_sync_steps",
    "reference.mixup": "ref_model_mixup_alpha",
    "algorithm.sample_epochs": "ppo_epochs num_iterations",
    # data and rewards
    "data.train": "dataset_name train_files prompt_data",
    "data.eval": "eval_dataset val_files",
    "data.system": "system_prompt",
    "data.overlong, drop or error: prompts are never cut": "data.truncation filter_overlong_prompts",
    "reward.<domain>.target; several, with weights: rewards.composite:CompositeReward": "reward_funcs",
    "reward.<domain>.target": "function reward_fn reward_manager",
    "reward.<domain>.target=rewards.reward_model:ModelReward, where a model judges": "reward_model.enable",
    "reward.<domain>.target=module:function or module:Class": "custom_reward_function.path custom_reward_function.name",
    # the run
    "run.dir": "output_dir default_local_dir",
    "run.name": "run_name experiment_name",
    "checkpoint.every": "save_steps save_freq",
    "checkpoint.keep": "save_total_limit max_actor_ckpt_to_keep",
    "checkpoint.resume": "resume_from_checkpoint resume_mode resume_from_path",
    "track.wandb, track.tensorboard, track.swanlab or track.trackio": "report_to track_with trainer.logger",
}
"""Settings here, with names elsewhere"""
RENAMED: Mapping[str, str] = {name: ours for ours, names in _THEIRS.items() for name in names.split()}

_ABSENT = {
    "gradient accumulation follows from train.tokens_per_microbatch": "gradient_accumulation_steps",
    "a step trains on rollout.prompts_per_step x rollout.answers_per_prompt samples on all ranks together; "
    "train.tokens_per_microbatch bounds memory": "per_device_train_batch_size",
    "engine.max_running bounds what is generated at the same time": "per_device_eval_batch_size",
    "train.tokens_per_microbatch bounds a micro-batch, in tokens": (
        "micro_batch_size_per_gpu ppo_micro_batch_size_per_gpu ppo_micro_batch_size "
        "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size"
    ),
    "train.updates_per_step is the number of mini-batches of a step": "ppo_mini_batch_size steps_per_generation",
    "a step generates rollout.prompts_per_step x rollout.answers_per_prompt samples": "generation_batch_size",
    "the length of a run is given in steps, or supervised in epochs": "num_train_epochs total_epochs epochs num_epochs",
    "the warm-up is given in updates: policy.warmup_steps": "warmup_ratio lr_warmup_steps_ratio",
    "micro-batches are always packed by tokens: train.tokens_per_microbatch": "use_dynamic_bsz",
    "sequences are always packed without padding": "use_remove_padding packing",
    "the KV cache is given in tokens: engine.kv_tokens": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "engine=vllm runs in the process of each rank": "vllm_mode",
    "engine.tp x engine.pp generator ranks form a replica; their number follows from that of the ranks": (
        "engine.dp engine.data_parallel_size vllm_data_parallel_size"
    ),
    "an engine's ranks have a part of each expert (engine.tp); whole experts on single ranks are not supported": (
        "engine.ep engine.expert_parallel engine.enable_expert_parallel"
    ),
    "torchrun sets the number of ranks: --nproc-per-node": "n_gpus_per_node num_gpus_per_node",
    "torchrun sets the number of nodes: --nnodes": "nnodes num_nodes",
    "ranks / train.tp / train.dp_replicate ranks share a copy of the model; set train.dp_replicate": "fsdp_size",
    "train=fsdp2 shards fully, train.dp_replicate makes several copies (HSDP); train=deepspeed has train.stage": (
        "sharding_strategy fsdp_sharding_strategy"
    ),
    "attention in training is torch's own: variable-length flash attention on GPUs, padded on the CPU; vLLM chooses "
    "its own (engine.args={attention_backend: NAME})": (
        "attn_implementation attn attention attn_impl attention_backend flash_attn use_flash_attn "
        "use_flash_attention_2 flash_attention"
    ),
    "answers are sampled without penalties, which would have to be part of the trained distribution; "
    "algorithm.repetition_coef takes score away from answers that repeat themselves": (
        "repetition_penalty presence_penalty frequency_penalty length_penalty no_repeat_ngram_size"
    ),
    "policy.lora.base=nf4 holds frozen weights under adapters in 4 bits": "load_in_4bit bnb_4bit_quant_type",
    "trained weights are bfloat16 or float32 (policy.dtype)": "load_in_8bit",
    "trackers log to the project spmd_rl (wandb: WANDB_PROJECT), under the name of run.dir": (
        "project_name wandb_project project"
    ),
    "a domain has one rewarder (reward.<domain>.target); rewards.composite:CompositeReward weighs its parts, and "
    "algorithm.advantage=gdpo their advantages (algorithm.reward_weights)": (
        "reward_weights multi_objective_aggregation"
    ),
    "run.dir/samples has all samples; python -m spmd_rl view shows them": "log_completions",
    "models are trained without dropout": "disable_dropout",
    "not needed: logits are never whole in memory, their logprobs are computed in chunks": "use_liger_kernel",
    "tokens are not selected by entropy; algorithm.loss=clip_cov and kl_cov do by covariance": "top_entropy_quantile",
    "not needed: prompts stay messages until the model's own chat template renders them": "return_raw_chat",
    "samples are always balanced over ranks by their tokens": "balance_batch",
    "agents have a pipeline of their own: python -m spmd_rl.agentic": "multi_turn.enable",
    "metrics.jsonl has a line for each step": "logging_steps",
    "all files of a run are in run.dir": "logging_dir",
    "nothing is uploaded; the last checkpoint has a Hugging Face model: checkpoint.export_hf": "push_to_hub",
    "a stall ends the run: journal.stall_seconds": "ddp_timeout nccl_timeout",
    "policy.lora.rank above 0 trains adapters, through peft": "use_peft peft_config",
    "prompts are always shuffled, by seed": "shuffle_dataset shuffle",
    "a rewarder gets all fields of a row": "remove_unused_columns",
    "training always samples, at rollout.temperature": "do_sample",
    "a step trains on rollout.prompts_per_step x rollout.answers_per_prompt samples": "batch_size",
}
"""Explanations of absent settings, with their names elsewhere"""
ABSENT: Mapping[str, str] = {name: told for told, names in _ABSENT.items() for name in names.split()}


EARLIER: Mapping[str, str] = {"teacher.alone": "teacher.only"}
"""Present names of settings, by earlier names."""


def with_present_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a run's saved settings with present names."""
    found = dict(tree)
    for old, new in EARLIER.items():
        section, _, name = old.rpartition(".")
        below = found.get(section)
        if isinstance(below, Mapping) and name in below:
            found[section] = {new.rpartition(".")[2] if key == name else key: value for key, value in below.items()}
    return found


def hint(key: str) -> str | None:
    """Return a hint for users of TRL, verl or ROLL; None for an unknown name."""
    parts = key.split(".")
    for n in range(len(parts)):
        name = ".".join(parts[n:])
        if name in RENAMED:
            return f"here it is {RENAMED[name]}"
        if name in ABSENT:
            return f"there is no such setting: {ABSENT[name]}"
    # The section alone decides in `optim.betas` or `lora.rank`.
    for section in parts[:-1]:
        if section in ABSENT:
            return f"there is no such setting: {ABSENT[section]}"
    return None
