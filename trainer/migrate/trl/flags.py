"""Fields of TRL's configurations as data: what each becomes where it stands alone.

A name may hold `*`. Keys are those of the recipes on rows; `PLACES` has PPO's where they differ.
"""

from __future__ import annotations

PROGRAMS = {"grpo": "ppo", "sft": "sft", "reward": "reward-model", "dpo": "dpo"}
"""TRL's command -> ours."""
PLACES = {
    "model.": "actor_rollout_ref.model.",
    "optim.": "actor_rollout_ref.actor.optim.",
    "grad_clip": "actor_rollout_ref.actor.grad_clip",
    "checkpoint.": "actor_rollout_ref.actor.checkpoint.",
}
"""Beginning of a key of the recipes on rows -> where PPO has it."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"

RENAMED = {
    "adam_epsilon": "optim.eps",
    "attn_implementation": "model.attn_implementation",
    "eval_on_start": "trainer.val_before_train",
    "gradient_checkpointing": "model.enable_gradient_checkpointing",
    "learning_rate": "optim.lr",
    "max_grad_norm": "grad_clip",
    "model_name_or_path": "model.path",
    "output_dir": "trainer.default_local_dir",
    "project": "trainer.project_name",
    "run_name": "trainer.experiment_name",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "seed": "trainer.seed",
    "use_liger_kernel": "model.use_fused_kernels",
    "weight_decay": "optim.weight_decay",
}
"""Fields of all four with one key of ours, which means the same."""

RENAMED_IN = {
    "grpo": {
        "entropy_coef": f"{ACTOR}.entropy_coeff",
        "mask_truncated_completions": "algorithm.mask_truncated",
        "max_completion_length": "data.max_response_length",
        "max_prompt_length": "data.max_prompt_length",
        "num_generations": f"{ROLLOUT}.n",
        "num_generations_eval": f"{ROLLOUT}.val_kwargs.n",
        "num_iterations": f"{ACTOR}.ppo_epochs",
        "router_aux_loss_coef": f"{ACTOR}.router_aux_loss_coef",
        "shuffle_dataset": "data.shuffle",
        "temperature": f"{ROLLOUT}.temperature",
        "top_p": f"{ROLLOUT}.top_p",
        "vllm_gpu_memory_utilization": f"{ROLLOUT}.gpu_memory_utilization",
        "vllm_tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    },
    "sft": {"max_length": "data.max_length"},
    "reward": {"center_rewards_coefficient": "center_coef", "max_length": "data.max_length"},
    "dpo": {"beta": "beta", "max_length": "data.max_length"},
}
"""The same, of one command."""

DEFAULTS: dict[str, object] = {
    "gradient_checkpointing": True,
    "seed": 42,
    "weight_decay": 0.0,
}
"""Their defaults that are others here, in all four."""
DEFAULTS_IN: dict[str, dict[str, object]] = {
    "grpo": {"num_generations": 8},
    "sft": {"learning_rate": 2e-5},
    "reward": {"learning_rate": 1e-4},
    "dpo": {"learning_rate": 1e-6},
}
"""The same, of one command."""

AS_MANY = "a run has as many processes as trainer.n_gpus_per_node and trainer.nnodes say"
IN_METRICS = "every step is in metrics.jsonl, on the console and in the report"
READ_ONCE = "rows are read and tokenized once, before the first step"
SHARDED = "models are sharded by FSDP: model.strategy, model.fsdp_config"
NO_PADDING = "rows run without padding wherever the model computes that right"
ENGINES_OWN = "rollout.engine_kwargs.vllm.* are vLLM's own settings"
NOT_COMPILED = "nothing is compiled"

ALWAYS = {
    "accelerator_config": AS_MANY,
    "activation_offloading": "activations are recomputed: model.enable_gradient_checkpointing",
    "auto_find_batch_size": "passes are cut by tokens, and larger rows take smaller passes",
    "average_tokens_across_devices": "losses are means over the tokens of all ranks",
    "bf16*": "on CUDA passes compute in bfloat16, over float32 weights and moments",
    "chat_template_path": "the chat template of the model's folder",
    "data_seed": "trainer.seed orders the rows, too",
    "dataloader_*": READ_ONCE,
    "dataset_num_proc": READ_ONCE,
    "dataset_text_field": "rows of plain text have a column text",
    "ddp_*": SHARDED,
    "debug": "a hang is named by who waits for whom; trainer.backend=local takes breakpoint()",
    "deepspeed": SHARDED,
    "disable_dropout": "policy and reference compute without dropout",
    "disable_tqdm": IN_METRICS,
    "do_eval": "eval_strategy says when",
    "do_predict": "eval_strategy says when",
    "do_train": "a run trains",
    "ds3_gather_for_generation": "the engine gets whole weights",
    "enable_jit_checkpoint": "a run that is told to stop by a signal saves first",
    "eval_do_concat_batches": "validation is of the whole set",
    "eval_use_gather_object": "validation is of the whole set",
    "fsdp*": SHARDED,
    "full_determinism": "a seed gives the same numbers again",
    "gradient_checkpointing_kwargs": "checkpointing does not re-enter",
    "ignore_data_skip": "a resumed run goes on with the row that comes next",
    "include_*": IN_METRICS,
    "length_column_name": "passes are cut by tokens",
    "local_rank": AS_MANY,
    "log_completions": "samples of every step are in the run folder",
    "log_multimodal": "samples of every step are in the run folder",
    "log_on_each_node": IN_METRICS,
    "log_level*": IN_METRICS,
    "log_unique_prompts": "samples of every step are in the run folder",
    "logging_*": IN_METRICS,
    "num_completions_to_print": "samples of every step are in the run folder",
    "optim_target_modules": "the optimizer has all trained parameters",
    "packing*": NO_PADDING,
    "eval_packing": NO_PADDING,
    "pad_to_multiple_of": NO_PADDING,
    "padding_free": NO_PADDING,
    "parallelism_config": SHARDED,
    "per_device_eval_batch_size": "passes of validation are cut as those of training",
    "eval_accumulation_steps": "passes of validation are cut as those of training",
    "batch_eval_metrics": "validation is of the whole set",
    "precompute_ref*": "the reference's log-probs are computed once, before the first step",
    "prediction_loss_only": IN_METRICS,
    "remove_unused_columns": "columns that nothing reads are not read",
    "restore_callback_states_from_checkpoint": "a resumed run goes on where it was",
    "save_on_each_node": "a checkpoint is one folder for all ranks",
    "skip_memory_metrics": IN_METRICS,
    "tf32": "passes compute in bfloat16; float32 is left as torch has it",
    "torch_compile*": NOT_COMPILED,
    "torch_empty_cache_steps": "an engine that shares its devices makes room",
    "train_sampling_strategy": "passes are cut by tokens",
    "transformers_continuous_batching_config": "an engine takes up a prompt as another ends",
    "use_bias_correction_kl": "set algorithm.rollout_correction",
    "use_cache": "an engine has its own cache",
    "cache_implementation": "an engine has its own cache",
    "use_transformers_*": "an engine takes up a prompt as soon as another ends",
    "vllm_enable_sleep_mode": "an engine that shares its devices makes room",
    "vllm_group_port": "ports are found by themselves",
    "vllm_max_model_length": "it is data.max_prompt_length + data.max_response_length",
    "vllm_mode": "placement says whether the engine has devices of its own",
    "vllm_model_impl": ENGINES_OWN,
    "vllm_server_*": "placement=standalone gives the engine a pool; there is no server",
    "lora_task_type": "the recipe says it",
}
"""Fields that change nothing here -> what is the case instead."""

ON_THE_HUB = "upload the folder that checkpoint.save_contents=[...,hf_model] writes"
IN_ONE_FOLDER = "give a folder that has all: model, tokenizer, chat template"
NOT_QUANTISED = "trained models are not quantised; model.lora_rank trains adapters alone"
NOT_THIS_LORA = "adapters are plain LoRA, without dropout, on linear layers"
FILTERED_LOSS = "the loss is over every token of the response"

ABSENT = {
    "assistant_only_loss": "the loss is on what the assistant says; data.loss_on=all on all",
    "bnb_*": NOT_QUANTISED,
    "use_bnb_nested_quant": NOT_QUANTISED,
    "cast_lm_head_to_fp32": "say model.compute_dtype=float32",
    "chat_template_kwargs": "write it into the model's chat template",
    "dataset_kwargs": READ_ONCE,
    "dataset_streaming": READ_ONCE,
    "datasets": "give a list of files in data.train_files",
    "discopop_tau": "losses are those of `loss=`, or your own by its dotted path",
    "eos_token": IN_ONE_FOLDER,
    "eval_delay": "trainer.test_freq says when",
    "f_*": "the divergence is the KL",
    "fp16*": "passes compute in bfloat16 or float32",
    "generation_kwargs": "say it in rollout.sampling_kwargs",
    "greater_is_better": "the checkpoint of the best validation stays; a loss is better if lower",
    "hub_*": ON_THE_HUB,
    "ignore_bias_buffers": SHARDED,
    "label_names": "columns are those of the recipe's rows",
    "label_smoothing_factor": "the loss is not smoothed",
    "ld_alpha": "loss=simpo divides by lengths",
    "liger_kernel_config": "model.use_fused_kernels has one implementation",
    "load_best_model_at_end": "the checkpoint of the best validation stays in the run folder",
    "load_in_*": NOT_QUANTISED,
    "log_completions_hub_repo": ON_THE_HUB,
    "lora_dropout": NOT_THIS_LORA,
    "lora_modules_to_save": NOT_THIS_LORA,
    "lora_target_parameters": NOT_THIS_LORA,
    "lr_scheduler_kwargs": "say optim.min_lr_ratio or optim.wsd_decay_ratio",
    "max_tool_calling_iterations": "a sample is one turn: calls of tools are not answered",
    "metric_for_best_model": "the best is by the mean of val-core/, or by the loss",
    "model_init_kwargs": "say model.dtype, model.attn_implementation",
    "model_revision": "give the folder of that revision",
    "neftune_noise_alpha": "embeddings get no noise",
    "off_policy_mask_threshold": "say algorithm.rollout_correction.rollout_rs",
    "optim_args": "optim.optimizer names a class, which gets the settings that it knows",
    "pad_token": IN_ONE_FOLDER,
    "push_to_hub*": ON_THE_HUB,
    "repetition_penalty": "tokens are drawn from the policy itself, whose log-probs are trained",
    "sapo_temperature_*": "the loss sapo has 1.0 and 1.05, its paper's",
    "save_only_model": "say checkpoint.save_contents=[model]",
    "top_entropy_quantile": FILTERED_LOSS,
    "trackio_*": "trackers are those of trainer.logger",
    "truncation_mode": "prompts too long for data.max_prompt_length are an error, or left out",
    "trust_remote_code": "code in model folders is not run: take a model that transformers has",
    "use_adaptive_entropy": f"say {ACTOR}.target_entropy, which steers the coefficient",
    "entropy_coef_*": f"say {ACTOR}.target_entropy, which steers the coefficient",
    "entropy_target": f"say {ACTOR}.target_entropy, which steers the coefficient",
    "use_cpu": "say trainer.device=cpu",
    "use_dora": NOT_THIS_LORA,
    "use_rslora": NOT_THIS_LORA,
    "use_weighting": "losses are those of `loss=`, or your own by its dotted path",
    "vespo_*": "there is no such loss; policy_loss.loss_mode takes your own by its dotted path",
    "vllm_structured_outputs_regex": "responses are drawn freely",
}
"""Fields without a counterpart -> the way out."""

NO_EXPERTS_LOSS = "the load-balancing loss of experts is PPO's alone: actor.router_aux_loss_coef"
FOLLOWS_NOTHING = "the reference is the model before training"
ABSENT_IN: dict[str, dict[str, str]] = {
    "grpo": {},
    "sft": {
        "loss_type": "the loss is the mean over tokens (nll)",
        "router_aux_loss_coef": NO_EXPERTS_LOSS,
        "shuffle_dataset": "rows are shuffled anew in every epoch, by trainer.seed",
    },
    "reward": {},
    "dpo": {
        "ref_model_*": FOLLOWS_NOTHING,
        "router_aux_loss_coef": NO_EXPERTS_LOSS,
        "sync_ref_model": FOLLOWS_NOTHING,
    },
}
"""The same, of one command."""

TOGETHER = {
    "adam_beta1": "`optim.betas`",
    "adam_beta2": "`optim.betas`",
    "dataset_config": "`data.train_files=hub://NAME/CONFIG:SPLIT`",
    "dataset_name": "`data.train_files=hub://NAME/CONFIG:SPLIT`",
    "dataset_test_split": "`data.val_files`, where `eval_strategy` is set",
    "dataset_train_split": "`data.train_files=hub://NAME/CONFIG:SPLIT`",
    "dtype": "`model.dtype`",
    "eval_steps": "`trainer.test_freq`",
    "eval_strategy": "`data.val_files`, `trainer.test_freq`",
    "gradient_accumulation_steps": "`data.train_batch_size`: rows of a step, over all processes",
    "lora_alpha": "`model.lora_alpha`, with `use_peft`",
    "lora_r": "`model.lora_rank`, with `use_peft`",
    "lora_target_modules": "`model.target_modules`, with `use_peft`",
    "lr_scheduler_type": "`optim.lr_scheduler_type`",
    "max_steps": "`trainer.total_training_steps`",
    "num_processes": "`trainer.n_gpus_per_node`",
    "num_train_epochs": "`trainer.total_epochs`",
    "optim": "AdamW; `optim.optimizer` names another class",
    "per_device_train_batch_size": "`data.train_batch_size`: rows of a step, over all processes",
    "report_to": "`trainer.logger`",
    "resume_from_checkpoint": "`trainer.resume_mode`, `trainer.resume_from_path`",
    "save_steps": "`trainer.save_freq`",
    "save_strategy": "`trainer.save_freq`",
    "torch_dtype": "`model.dtype`",
    "use_peft": "`model.lora_rank`, `model.lora_alpha`",
    "warmup_ratio": "`optim.lr_warmup_steps_ratio`",
    "warmup_steps": "`optim.lr_warmup_steps`; a number below 1 is a share",
}
"""Fields of all four that are read with others -> the keys that they decide."""
TOGETHER_IN: dict[str, dict[str, str]] = {
    "grpo": {
        "beta": f"`{ACTOR}.use_kl_loss`, `{ACTOR}.kl_loss_coef`",
        "delta": f"`{ACTOR}.clip_ratio_c`",
        "epsilon": f"`{ACTOR}.clip_ratio`",
        "epsilon_high": f"`{ACTOR}.clip_ratio_low`, `{ACTOR}.clip_ratio_high`",
        "generation_batch_size": "`data.train_batch_size`: prompts",
        "importance_sampling_level": f"`{ACTOR}.policy_loss.loss_mode=gspo` for sequences",
        "loss_type": f"`{ACTOR}.policy_loss.loss_mode`, `{ACTOR}.loss_agg_mode`",
        "min_p": f"`{ROLLOUT}.sampling_kwargs`",
        "multi_objective_aggregation": "`algorithm.adv_estimator=gdpo` normalizes each reward",
        "ref_model_mixup_alpha": "`actor_rollout_ref.ref.ema_decay`: one less theirs",
        "ref_model_sync_steps": "`actor_rollout_ref.ref.update_every`",
        "reward_funcs": "`rewards`, or `custom_reward_function.path`",
        "reward_model_name_or_path": "`reward_model.enable`, `reward_model.model.path`",
        "reward_weights": "the weights in `rewards`",
        "scale_rewards": "`algorithm.adv_estimator`, `algorithm.norm_adv_by_std_in_grpo`",
        "steps_per_generation": "`data.train_batch_size`: prompts",
        "sync_ref_model": "`actor_rollout_ref.ref.update_every`",
        "top_k": f"`{ROLLOUT}.top_k`",
        "use_vllm": f"`{ROLLOUT}.name`",
        "vllm_importance_sampling_cap": f"`{CORRECTION}.rollout_is_threshold`",
        "vllm_importance_sampling_clip_max": f"`{CORRECTION}.rollout_is_threshold`",
        "vllm_importance_sampling_clip_min": f"`{CORRECTION}.rollout_is_threshold`",
        "vllm_importance_sampling_correction": f"`{CORRECTION}.rollout_is`",
        "vllm_importance_sampling_mode": f"`{CORRECTION}.rollout_is`",
    },
    "sft": {"completion_only_loss": "`data.loss_on`"},
    "reward": {},
    "dpo": {
        "label_smoothing": "`loss=cdpo`, `label_smoothing`",
        "loss_type": "`loss`",
        "loss_weights": "`sft_coef`, where the second loss is sft",
    },
}
"""The same, of one command."""
