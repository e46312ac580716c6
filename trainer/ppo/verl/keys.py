"""Keys of verl's PPO trainer that are no keys here, as data.

A name may hold `*`. The tables say what becomes of a key in an override, in a whole script of
verl's, and in the docs.
"""

from __future__ import annotations

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"

RENAMED = {
    f"{ACTOR}.checkpoint.contents": f"{ACTOR}.checkpoint.save_contents",
    f"{ACTOR}.fsdp_config.dtype": f"{MODEL}.compute_dtype",
    f"{ACTOR}.kl_loss.coef": f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.kl_loss.type": f"{ACTOR}.kl_loss_type",
    f"{ACTOR}.optim.clip_grad": f"{ACTOR}.grad_clip",
    f"{ACTOR}.optim.warmup_style": f"{ACTOR}.optim.lr_scheduler_type",
    f"{MODEL}.lora.alpha": f"{MODEL}.lora_alpha",
    f"{MODEL}.lora.rank": f"{MODEL}.lora_rank",
    f"{MODEL}.lora.target_modules": f"{MODEL}.target_modules",
    "actor_rollout_ref.ref.param_offload": "actor_rollout_ref.ref.fsdp_config.param_offload",
    "algorithm.in_reward_kl.coef": "algorithm.kl_ctrl.kl_coef",
    "algorithm.in_reward_kl.kl_ctrl.type": "algorithm.kl_ctrl.type",
    "algorithm.in_reward_kl.type": "algorithm.kl_penalty",
    "critic.checkpoint.contents": "critic.checkpoint.save_contents",
    "critic.fsdp.optimizer_offload": "critic.model.fsdp_config.optimizer_offload",
    "critic.fsdp.param_offload": "critic.model.fsdp_config.param_offload",
    "critic.optim.clip_grad": "critic.grad_clip",
    "ray_init.runtime_env": "ray.runtime_env",
    "reward.custom_reward_function.name": "custom_reward_function.name",
    "reward.custom_reward_function.path": "custom_reward_function.path",
    "reward.custom_reward_function.reward_kwargs": "custom_reward_function.reward_kwargs",
}
"""Names of several versions of verl -> ours; further ones stand at the fields, `key(verl=...)`."""

SAME_VALUES = {
    f"{ACTOR}.strategy": {"fsdp2": "fsdp"},
    "critic.strategy": {"fsdp2": "fsdp"},
}
"""Key -> verl's word for a value -> ours."""

ENGINE_DECIDES = "the engine decides; actor_rollout_ref.rollout.engine_kwargs.vllm.* are vLLM's own"
CUT_AS_THE_ACTORS = "passes of all roles are cut as the actor's: actor.use_dynamic_bsz"
NOT_COMPILED = "nothing is compiled"
NO_PROFILER = "the report's timeline has the time of every call; there is no profiler"
PADDING = "actor_rollout_ref.model.use_remove_padding holds for every role"
CHUNKED = "entropies of large logits are always made in chunks"
TOKENIZED_ONCE = "prompts are read and tokenized once, before the first step"
ALL_SAMPLES = (
    "the samples are in the run folder; trainer.max_rollouts_to_keep says of how many steps all"
)

CHANGES_NOTHING = {
    "*.entropy_checkpointing": CHUNKED,
    "*.entropy_from_logits_with_chunking": CHUNKED,
    "*.forward_max_token_len_per_gpu": CUT_AS_THE_ACTORS,
    "*.forward_micro_batch_size_per_gpu": CUT_AS_THE_ACTORS,
    "*.fsdp_config.forward_prefetch": "FSDP fetches the next layer while one computes",
    "*.fsdp_config.grad_offload": "gradients stay on the device until the optimizer's step",
    "*.fsdp_config.use_orig_params": "parameters keep their names and shapes",
    "*.fsdp_config.wrap_policy*": "each layer of the model is a unit of FSDP",
    "*.log_prob_max_token_len_per_gpu": CUT_AS_THE_ACTORS,
    "*.log_prob_use_dynamic_bsz": CUT_AS_THE_ACTORS,
    "*.model.fused_kernel_options*": "model.use_fused_kernels has one implementation",
    "*.profile_*": NO_PROFILER,
    "*.profiler.*": NO_PROFILER,
    "*.use_shm": "a model is read from its folder",
    "*.use_torch_compile": NOT_COMPILED,
    "actor_rollout_ref.actor.calculate_entropy": "entropies come with the old log-probs",
    "actor_rollout_ref.actor.calculate_sum_pi_squared": "the estimator that reads it asks for it",
    "actor_rollout_ref.nccl_timeout": "a call that hangs is ended by its deadline, with its place",
    "actor_rollout_ref.ref.strategy": "the reference is sharded as the actor",
    "actor_rollout_ref.rollout.agent.num_workers": "an engine gets all its prompts at once",
    "actor_rollout_ref.rollout.calculate_log_probs": "the engine's log-probs are always kept",
    "actor_rollout_ref.rollout.checkpoint_engine.*": "weights go over nccl or gloo, verified",
    "actor_rollout_ref.rollout.disable_log_stats": "the engine's own statistics are not printed",
    "actor_rollout_ref.rollout.enable_chunked_prefill": ENGINE_DECIDES,
    "actor_rollout_ref.rollout.enable_prefix_caching": ENGINE_DECIDES,
    "actor_rollout_ref.rollout.enforce_eager": ENGINE_DECIDES,
    "actor_rollout_ref.rollout.free_cache_engine": "an engine that shares its devices makes room",
    "actor_rollout_ref.rollout.layered_summon": "weights always travel in pieces",
    "actor_rollout_ref.rollout.load_format": "the engine gets its weights from the actor",
    "actor_rollout_ref.rollout.max_batch_size": ENGINE_DECIDES,
    "actor_rollout_ref.rollout.max_model_len": "it is data.max_prompt_length + max_response_length",
    "actor_rollout_ref.rollout.max_num_batched_tokens": ENGINE_DECIDES,
    "actor_rollout_ref.rollout.mode": "an engine takes up a prompt as soon as another ends",
    "actor_rollout_ref.rollout.multi_turn.format": "there is one turn",
    "actor_rollout_ref.rollout.skip_tokenizer_init": "engines see token ids only",
    "critic.model.use_remove_padding": PADDING,
    "critic.use_dynamic_bsz": CUT_AS_THE_ACTORS,
    "data.dataloader_num_workers": TOKENIZED_ONCE,
    "data.filter_overlong_prompts_workers": TOKENIZED_ONCE,
    "data.return_full_prompt": TOKENIZED_ONCE,
    "data.return_raw_chat": "chats are kept beside their tokens",
    "critic.checkpoint.async_save": "trainer.async_save says it for all roles",
    "data.return_raw_input_ids": TOKENIZED_ONCE,
    "data.use_shm": TOKENIZED_ONCE,
    "data.val_batch_size": "validation is always of the whole set",
    "global_profiler.*": NO_PROFILER,
    "profile.*": NO_PROFILER,
    "ray_init.*": "ray.address, ray.namespace and ray.runtime_env say how Ray starts",
    "ray_kwargs.*": "ray.address, ray.namespace and ray.runtime_env say how Ray starts",
    "reward_model.launch_reward_fn_async": "rewards are always computed beside the other roles",
    "reward_model.model.fsdp_config.param_offload": "the reward model stays on its device",
    "reward_model.model.use_remove_padding": PADDING,
    "reward_model.num_workers": "reward functions run in processes of their own",
    "reward_model.use_dynamic_bsz": CUT_AS_THE_ACTORS,
    "reward_model.use_reward_loop": "rewards are always computed beside the other roles",
    "trainer.balance_batch": "rows are always balanced over the ranks by their tokens",
    "trainer.del_local_ckpt_after_load": "trainer.max_ckpt_to_keep says which checkpoints stay",
    "trainer.esi_redundant_time": "no platform says when a run ends: trainer.save_freq",
    "trainer.log_val_generations": ALL_SAMPLES,
    "trainer.max_critic_ckpt_to_keep": "a checkpoint holds all roles: trainer.max_ckpt_to_keep",
    "trainer.ray_wait_register_center_timeout": "a call that hangs is ended by its deadline",
    "trainer.rollout_data_dir": ALL_SAMPLES,
    "trainer.use_legacy_worker_impl": "there is one implementation of each role",
    "trainer.validation_data_dir": ALL_SAMPLES,
}
"""Keys that change nothing, whatever their value -> what is the case instead."""

NO_CODE = "code in model folders is not run: take a model that transformers has"
IN_ONE_FOLDER = "give a folder that has all: model, tokenizer, chat template"
NOT_CUT = "a row is not cut over devices: offload, or take a smaller ppo_max_token_len_per_gpu"
PER_DEVICE = "divide it by the number of processes, and say ..._micro_batch_size_per_gpu"
ONE_TURN = "a sample is one turn: calls of tools are not answered"
NO_IMAGES = "models with images are not trained here"
FEWER_ROWS = "give a file of as many rows"

CHANGES_NOTHING_AT: dict[str, tuple[tuple[str, ...], str]] = {
    "*.external_lib": (("null",), NO_CODE),
    "*.fsdp_config.model_dtype": (("fp32", "float32"), "say actor_rollout_ref.model.dtype"),
    "*.fsdp_config.offload_policy": (("false",), "say strategy=fsdp+offload"),
    "*.fsdp_config.reshard_after_forward": (("true",), "say strategy=shard_grad_op"),
    "*.fsdp_config.strategy": (("fsdp", "fsdp2"), "say actor_rollout_ref.actor.strategy"),
    "*.micro_batch_size": (("null",), PER_DEVICE),
    "*.log_prob_micro_batch_size": (("null",), PER_DEVICE),
    "*.ppo_micro_batch_size": (("null",), PER_DEVICE),
    "*.override_config": (("{}",), "write it into the config.json of the model's folder"),
    "*.trust_remote_code": (("false",), NO_CODE),
    "*.ulysses_sequence_parallel_size": (("1",), NOT_CUT),
    "actor_rollout_ref.actor.freeze_vision_tower": (("false",), NO_IMAGES),
    "actor_rollout_ref.hybrid_engine": (("true",), "say placement=split for pools of their own"),
    "actor_rollout_ref.model.custom_chat_template": (("null",), IN_ONE_FOLDER),
    "actor_rollout_ref.model.enable_activation_offload": (
        ("false",),
        "recompute activations instead: model.enable_gradient_checkpointing",
    ),
    "actor_rollout_ref.model.exclude_modules": (("null",), "name those to train: target_modules"),
    "actor_rollout_ref.model.use_liger": (("false",), "model.use_fused_kernels saves the memory"),
    "actor_rollout_ref.rollout.data_parallel_size": (("1",), "the pool's size says how many"),
    "actor_rollout_ref.rollout.expert_parallel_size": (("1",), "take tensor parallelism"),
    "actor_rollout_ref.rollout.ignore_eos": (("false",), "a response ends at its first stop id"),
    "actor_rollout_ref.rollout.multi_turn.enable": (("false",), ONE_TURN),
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": (("1",), "take tensor parallelism"),
    "actor_rollout_ref.rollout.quantization": (("null",), "say rollout.dtype"),
    "data.reward_fn_key": (("data_source",), "call the column data_source"),
    "data.seed": (("null",), "trainer.seed orders the prompts, too"),
    "data.tokenizer": (("null",), IN_ONE_FOLDER),
    "data.train_max_samples": (("-1",), FEWER_ROWS),
    "data.val_max_samples": (("-1",), FEWER_ROWS),
    "data.validation_shuffle": (("false",), "validation goes through its files in order"),
    "reward_model.enable_resource_pool": (("false",), "say role_mapping.reward_model=<pool>"),
    "reward_model.model.input_tokenizer": (
        ("null",),
        "the reward model reads the actor's tokens: take one on its tokenizer, or ask it over "
        "HTTP (`rewards`, kind: remote)",
    ),
    "reward_model.reward_manager": (
        ("naive", "prime"),
        "reward functions are called one way; dapo's punishment of length is "
        "reward_model.overlong_buffer.enable, your own code custom_reward_function.path",
    ),
    "trainer.default_hdfs_dir": (("null",), "mount it, and say trainer.default_local_dir"),
    "trainer.val_only": (
        ("false",),
        "trainer.val_before_train=true trainer.total_training_steps=1 validates, then steps once",
    ),
    "transfer_queue.enable": (("false",), "batches travel as references anyway"),
}
"""Keys that change nothing at these values -> and the way out at any other."""

AS_THE_ACTORS = {
    "critic.optim.betas": (f"{ACTOR}.optim.betas", "[0.9,0.999]"),
    "critic.optim.eps": (f"{ACTOR}.optim.eps", "1e-8"),
    "critic.optim.lr_scheduler_type": (f"{ACTOR}.optim.lr_scheduler_type", "constant"),
    "critic.optim.min_lr_ratio": (f"{ACTOR}.optim.min_lr_ratio", "0.0"),
    "critic.optim.warmup_style": (f"{ACTOR}.optim.lr_scheduler_type", "constant"),
    "critic.optim.weight_decay": (f"{ACTOR}.optim.weight_decay", "0.01"),
}
"""Keys of the critic that it has from the actor -> the actor's, and its default.

They change nothing at the actor's value, and are refused at any other.
"""

FSDP_ONLY = "models are sharded by FSDP: drop it, and say actor.strategy where fsdp is not meant"
NO_SANDBOX = (
    "programs run in a sandbox of their own (workers.rewards.code); a function of your own may "
    "ask a server: custom_reward_function.path"
)
SERVED = "serve the reward model, and ask it: `rewards`, kind: remote"

NOT_HERE = {
    "*.megatron.*": FSDP_ONLY,
    "*.override_config.*": "write it into the config.json of the model's folder",
    "*.hf_config_path": IN_ONE_FOLDER,
    "*.tokenizer_path": IN_ONE_FOLDER,
    "actor_rollout_ref.rollout.agent.*": ONE_TURN,
    "actor_rollout_ref.rollout.multi_turn.*": ONE_TURN,
    "actor_rollout_ref.rollout.prompt_length": "say data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "say data.max_response_length",
    "actor_rollout_ref.rollout.swap_space": ENGINE_DECIDES,
    "data.apply_chat_template_kwargs*": "write it into the model's chat template",
    "data.image_key": NO_IMAGES,
    "data.video_key": NO_IMAGES,
    "data.sampler.*": "own orders of prompts come by data.custom_cls.path",
    "reward_model.param_offload": "the reward model stays on its device",
    "reward_model.reward_kwargs.*": "custom_reward_function.reward_kwargs are a function's own",
    "reward_model.rollout.*": SERVED,
    "reward_model.n_gpus_per_node": "say resource_pool_spec.<pool>, role_mapping.reward_model",
    "reward_model.nnodes": "say resource_pool_spec.<pool>, role_mapping.reward_model",
    "reward_model.sandbox_fusion*": NO_SANDBOX,
    "trainer.npu_profile.*": NO_PROFILER,
}
"""Keys that have no counterpart -> the way out."""
