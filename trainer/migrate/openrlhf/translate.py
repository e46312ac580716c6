"""A script or a command line that runs `train_ppo_ray`, in our settings.

The tables of `trainer.migrate.openrlhf.flags` say what one flag becomes; here and in the modules
beside is what takes several flags together.
"""

from __future__ import annotations

from typing import Any

from trainer.migrate.command import read_flags
from trainer.migrate.openrlhf.algorithm import algorithm, losses
from trainer.migrate.openrlhf.given import GivenFlags
from trainer.migrate.openrlhf.placement import placement
from trainer.migrate.translation import Translation
from verl_like.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, REFERENCE = "actor_rollout_ref.model", "actor_rollout_ref.ref"
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine_with_min_lr": "cosine"}
STRATEGY_OF_ZERO = {0: "ddp", 1: "shard_grad_op", 2: "shard_grad_op", 3: "fsdp"}


def translate(text: str) -> Translation:
    """Settings, and a word on every flag."""
    flags = GivenFlags(read_flags(text, "train_ppo_ray"))
    done = Translation()
    for section in (
        _models,
        _data,
        _rewards,
        _sizes,
        algorithm,
        losses,
        _optimizer,
        _sharding,
        _rollout,
        placement,
        _run,
    ):
        section(flags, done)
    flags.tell_the_rest(done)
    return done


def _models(flags: GivenFlags, done: Translation) -> None:
    critic = flags.value("critic_pretrain", "")
    if critic:
        flags.becomes(done, "critic_pretrain", {"critic.model.path": critic})
    elif flags.has_critic and flags.has("reward_pretrain"):
        first = flags.value("reward_pretrain", "").split(",")[0]
        done.default("--critic_pretrain", "the reward model", {"critic.model.path": first})
    flags.becomes(
        done,
        "gradient_checkpointing",
        dict.fromkeys(
            (
                f"{MODEL}.enable_gradient_checkpointing",
                "critic.model.enable_gradient_checkpointing",
            ),
            True,
        ),
    )
    attention = flags.value("attn_implementation", "")
    flags.becomes(done, "attn_implementation", {f"{MODEL}.attn_implementation": attention})
    flags.becomes(
        done, "target_modules", {f"{MODEL}.target_modules": _one_or_list(flags, "target_modules")}
    )
    if flags.number("lora_dropout", 0):
        done.absent.append(f"{flags.spelled('lora_dropout')}: adapters have no dropout")


def _data(flags: GivenFlags, done: Translation) -> None:
    flags.defaults_to(done, "input_key", "input", "data.prompt_key")
    response = flags.value("generate_max_len", "")
    if flags.has("max_len") and flags.has("generate_max_len"):
        whole = flags.count("max_len", 2048)
        prompt = whole - flags.count("generate_max_len", 1024)
        flags.becomes(done, "max_len", {"data.max_prompt_length": prompt})
    elif flags.has("max_len"):
        half = flags.count("max_len", 2048) // 2
        lengths = {"data.max_prompt_length": half, "data.max_response_length": half}
        flags.becomes(done, "max_len", lengths)
        done.absent.append(
            f"{flags.spelled('max_len')} alone: a response has what its prompt leaves there; here "
            "each has a limit, so look whether halves are right"
        )

    flags.becomes(done, "generate_max_len", {"data.max_response_length": response})
    flags.defaults_to(done, "generate_max_len", 1024, "data.max_response_length")
    flags.defaults_to(done, "prompt_max_len", 1024, "data.max_prompt_length")

    if flags.has("eval_dataset"):
        temperature = flags.value("eval_temperature", "0.6")
        settings = {
            f"{ROLLOUT}.val_kwargs.temperature": temperature,
            f"{ROLLOUT}.val_kwargs.do_sample": True,
        }
        flags.becomes(done, "eval_temperature", settings)
        done.default("--eval_temperature", "0.6", settings)
        flags.defaults_to(done, "eval_n_samples_per_prompt", 4, f"{ROLLOUT}.val_kwargs.n")
    else:
        flags.values("eval_temperature")


def _rewards(flags: GivenFlags, done: Translation) -> None:
    urls = flags.value("remote_rm_url", "")
    models = flags.value("reward_pretrain", "")
    if urls.endswith(".py"):
        done.rename(
            flags.spelled("remote_rm_url"),
            [urls],
            {"custom_reward_function.path": urls, "custom_reward_function.name": "compute_score"},
        )
        done.absent.append(
            "reward_func(queries, prompts, labels): name it compute_score, and its parameters by "
            "what they hold: solution_strs, raw_prompts, ground_truths; it returns a list"
        )
    elif urls:
        flags.becomes(done, "remote_rm_url", {"rewards": _reward_list(urls.split(","), "url")})

    if not models:
        return
    if "," in models:
        flags.becomes(done, "reward_pretrain", {"rewards": _reward_list(models.split(","), "path")})
        return
    flags.becomes(
        done,
        "reward_pretrain",
        {
            "reward_model.enable": True,
            "reward_model.model.path": models,
            "reward_model.rule_weight": 0,
        },
    )


def _reward_list(places: list[str], column: str) -> str:
    """The value of `rewards` for servers at URLs, or for models in folders."""
    kind = "remote, protocol: openrlhf" if column == "url" else "model"
    sections = []
    for number, place in enumerate(places):
        sections.append(f'{{name: reward_{number}, kind: {kind}, {column}: "{place}"}}')
    return f"[{', '.join(sections)}]"


def _sizes(flags: GivenFlags, done: Translation) -> None:
    num_samples = flags.count("n_samples_per_prompt", 1)
    step = flags.count("train_batch_size", 128)
    if step % num_samples:
        raise ConfigError(
            f"{flags.spelled('train_batch_size')} {step} samples are no whole number of prompts of "
            f"{flags.spelled('n_samples_per_prompt')} {num_samples} samples: an optimizer step has "
            "whole groups here. Take a multiple."
        )
    flags.becomes(done, "n_samples_per_prompt", {f"{ROLLOUT}.n": num_samples})
    flags.becomes(done, "train_batch_size", {f"{ACTOR}.ppo_mini_batch_size": step // num_samples})
    flags.defaults_to(done, "rollout_batch_size", 1024, "data.train_batch_size")
    if not flags.has("train_batch_size"):
        settings = {f"{ACTOR}.ppo_mini_batch_size": step // num_samples}
        done.default("--train_batch_size", "128 samples", settings)
    flags.becomes(done, "use_dynamic_batch", {f"{ACTOR}.use_dynamic_bsz": True})
    if flags.has("use_dynamic_batch"):
        flags.ignore("micro_train_batch_size", "micro_rollout_batch_size")
        return
    rows = flags.value("micro_rollout_batch_size", "")
    asked = {f"{REFERENCE}.log_prob_micro_batch_size_per_gpu": rows}
    flags.becomes(done, "micro_rollout_batch_size", asked)
    flags.ignore("train_max_tokens_per_gpu")


def _optimizer(flags: GivenFlags, done: Translation) -> None:
    optim = f"{ACTOR}.optim"
    schedule = flags.value("lr_scheduler", "cosine_with_min_lr")
    if schedule not in SCHEDULES:
        done.absent.append(
            f"{flags.spelled('lr_scheduler')} {schedule}: there are constant, linear, cosine, wsd"
        )
    ours = SCHEDULES.get(schedule, "cosine")
    flags.becomes(done, "lr_scheduler", {f"{optim}.lr_scheduler_type": ours})
    flags.defaults_to(done, "lr_scheduler", ours, f"{optim}.lr_scheduler_type")
    if ours == "cosine":
        flags.defaults_to(done, "actor.min_lr_ratio", 0.1, f"{optim}.min_lr_ratio")

    share = flags.value("lr_warmup_ratio", "0.03")
    for name, section in (("lr_warmup_ratio", optim), ("critic.lr_warmup_ratio", "critic.optim")):
        if section == "critic.optim" and not flags.has_critic:
            continue
        settings = {
            f"{section}.lr_warmup_steps": -1,
            f"{section}.lr_warmup_steps_ratio": flags.value(name, share),
        }
        flags.becomes(done, name, settings)
        done.default(f"--{name}", share, settings)
    if flags.has_critic:
        flags.defaults_to(done, "critic_learning_rate", 9e-6, "critic.optim.lr")
    betas = flags.values("adam_betas") or ["0.9", "0.95"]
    flags.becomes(done, "adam_betas", {f"{optim}.betas": betas})
    flags.defaults_to(done, "adam_betas", betas, f"{optim}.betas")
    flags.defaults_to(done, "l2", 0.0, f"{optim}.weight_decay")


def _sharding(flags: GivenFlags, done: Translation) -> None:
    sections = [ACTOR, "critic"] if flags.has_critic else [ACTOR]
    stage = flags.count("zero_stage", 2)
    if stage not in STRATEGY_OF_ZERO:
        raise ConfigError(f"{flags.spelled('zero_stage')} {stage}: ZeRO has the stages 0 to 3.")
    strategy = STRATEGY_OF_ZERO[stage]
    settings = {f"{section}.strategy": strategy for section in sections}
    flags.becomes(done, "zero_stage", settings)
    done.default("--zero_stage", 2, settings)
    keys = [f"{ACTOR}.fsdp_config.optimizer_offload"]
    if flags.has_critic:
        keys.append("critic.model.fsdp_config.optimizer_offload")
    flags.becomes(done, "adam_offload", dict.fromkeys(keys, True))
    offloaded = {f"{REFERENCE}.fsdp_config.param_offload": True}
    flags.becomes(done, "ref_reward_offload", offloaded)
    flags.becomes(done, "ref.offload", offloaded)
    if flags.has("reward.offload") or flags.has("ref_reward_offload"):
        done.absent.append("offload of the reward model: it stays on its device")


def _rollout(flags: GivenFlags, done: Translation) -> None:
    if flags.count("vllm_num_engines", 0):
        done.rename(
            flags.spelled("vllm_num_engines"),
            flags.values("vllm_num_engines"),
            {f"{ROLLOUT}.name": "vllm"},
        )
        ranks = flags.value("vllm_tensor_parallel_size", "1")
        parallel = {f"{ROLLOUT}.tensor_model_parallel_size": ranks}
        flags.becomes(done, "vllm_tensor_parallel_size", parallel)
        flags.defaults_to(
            done, "vllm_gpu_memory_utilization", 0.95, f"{ROLLOUT}.gpu_memory_utilization"
        )
        engine = f"+{ROLLOUT}.engine_kwargs.vllm"
        flags.becomes(done, "enforce_eager", {f"{engine}.enforce_eager": True})
        flags.becomes(done, "enable_prefix_caching", {f"{engine}.enable_prefix_caching": True})
        return
    for name in ("vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "enforce_eager"):
        flags.values(name)
    flags.values("enable_prefix_caching")
    done.default("--vllm_num_engines", "0: the actor generates", {f"{ROLLOUT}.name": "native"})


def _run(flags: GivenFlags, done: Translation) -> None:
    contents = "[model,optimizer,extra,hf_model]"
    flags.becomes(done, "save_hf_ckpt", {f"{ACTOR}.checkpoint.save_contents": contents})
    flags.becomes(done, "save_value_network", {"critic.checkpoint.save_contents": contents})
    names = ["console"]
    if flags.has("use_wandb"):
        names.append("wandb")
    if flags.has("use_tensorboard"):
        names.append("tensorboard")
    for name in ("use_wandb", "use_tensorboard"):
        flags.becomes(done, name, {"trainer.logger": names})
    flags.defaults_to(done, "seed", 42, "trainer.seed")


def _one_or_list(flags: GivenFlags, name: str) -> Any:
    values = flags.values(name)
    return values[0] if len(values) == 1 else values
