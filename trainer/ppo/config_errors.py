"""Checks across PPO's keys: sizes that must divide, required keys, keys that exclude each other.

A rule about one key is declared at its field, where `trainer.config.checks` reads it. A run that
can train, but not as its keys suggest, gets a warning
(`trainer.ppo.config_warnings`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from trainer.config.checks import check_ranks
from trainer.config.devices import run_devices
from trainer.ppo.advantage_inputs import GDPO_KEY, columns_read, compares_with_greedy
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, needs_groups
from trainer.ppo.config import AlgorithmConfig, PPOConfig
from trainer.ppo.filters import active_filters
from trainer.ppo.roles import declared_models, rollout_configs
from trainer.ppo.sampling import METRIC_KEY
from trainer.ppo.updating import longest_row
from trainer.rollouts.preflight import check_rewards
from trainer.rollouts.samples import read_named_reward
from verl_like.batch.protocol import DataProto
from verl_like.config_key import settable_arguments
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles
from workers.config import critic_optim, is_actors_module, tokens_per_pass
from workers.config.conditions import has_only_teacher, has_teacher
from workers.losses.registry import get_policy_loss, traits_of
from workers.rollout.build_engine import check_quantization
from workers.rollout.sampling import check_sampling
from workers.training.optim import check_optim

if TYPE_CHECKING:
    from workers.agents.host import Kind

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
SECTION = "algorithm.rollout_correction"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
LORA_RANK = "actor_rollout_ref.model.lora_rank"


def reject(config: PPOConfig) -> None:
    """Reject settings that cannot work together; the error has the numbers and a way out."""
    check_rewards(config)
    _reject_sizes(config)
    _reject_rewards(config)
    _reject_losses(config)
    _reject_weights(config)
    check_quantized_device(config)
    for role, model in declared_models(config, without_users=True).items():
        check_ranks(config, role, model.sharding)
    check_optim(config.actor_rollout_ref.actor.optim, f"{ACTOR}.optim")
    check_optim(critic_optim(config), "critic.optim")
    check_sampling(config.actor_rollout_ref.rollout, config.data.max_response_length)


def _reject_sizes(config: PPOConfig) -> None:
    """Reject numbers of steps, prompts and tokens that do not fit together."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    custom = config.data.custom_cls
    if custom.path and not custom.name:
        raise ConfigError(
            f"data.custom_cls.path={custom.path} is set, but not the name of your function or "
            "class. Set data.custom_cls.name."
        )

    warmup, total = config.trainer.critic_warmup, config.trainer.total_training_steps
    if "critic" in config.role_mapping and total is not None and warmup >= total:
        raise ConfigError(
            f"trainer.critic_warmup={warmup} of trainer.total_training_steps={total} steps: the "
            "actor never trains. Lower trainer.critic_warmup, or raise "
            "trainer.total_training_steps."
        )

    prompts = config.data.total_prompts
    if prompts is not None and total is not None:
        raise ConfigError(
            f"data.total_prompts={prompts} and trainer.total_training_steps={total} both set the "
            "length of the run. Set only one: total_prompts counts prompts, total_training_steps "
            "steps."
        )
    if prompts is not None and algorithm.filter_groups.enable:
        raise ConfigError(
            f"data.total_prompts={prompts} sets the length of the run by a fixed number of prompts "
            "per step, but with algorithm.filter_groups.enable a step draws as many as it needs. "
            "Set trainer.total_training_steps instead of data.total_prompts, or leave out the "
            "filter."
        )

    # the prompts of every step divide into whole mini-batches, or are fewer than one
    batch_size = config.data.train_batch_size
    sizes = {
        f"{ACTOR}.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "critic.ppo_mini_batch_size": config.critic.ppo_mini_batch_size,
    }
    for key, size in sizes.items():
        if size is None:
            continue
        if size <= 0 or batch_size % size:
            divisors = [number for number in range(1, batch_size + 1) if batch_size % number == 0]
            nearest = sorted(divisors, key=lambda divisor: abs(divisor - size))[:2]
            raise ConfigError(
                f"{key}={size} prompts does not divide data.train_batch_size={batch_size} prompts; "
                f"nearest that do: {', '.join(map(str, sorted(nearest)))}."
            )
        left = (prompts or 0) % batch_size
        if prompts is not None and left > size and left % size:
            raise ConfigError(
                f"data.total_prompts={prompts} leaves {left} prompts for the last step "
                f"(data.train_batch_size={batch_size}), not a multiple of {key}={size}. Set "
                f"data.total_prompts={prompts - left % size}, or {key} to a divisor of "
                f"{math.gcd(left, batch_size)}."
            )

    # a pass over the ranks that share a row has room for the longest row
    longest = config.data.max_prompt_length + config.data.max_response_length
    budget, models = tokens_per_pass(config), declared_models(config, without_users=True)
    for role, model in models.items() if actor.use_dynamic_bsz else ():
        name = "critic" if model.tokens is not None else ACTOR
        limit, num_ranks = model.tokens or budget, model.sharding.sp
        if num_ranks * limit < longest:
            ranks = f" x {num_ranks} ranks (parallel.sp of {role})" * (num_ranks > 1)
            raise ConfigError(
                f"{name}.ppo_max_token_len_per_gpu={limit} tokens{ranks} is less than one sample "
                f"of data.max_prompt_length + data.max_response_length = {longest} tokens. Raise "
                f"{name}.ppo_max_token_len_per_gpu to {-(-longest // num_ranks)}."
            )
    text, num_ranks = longest_row(config), models["actor"].sharding.sp
    if actor.use_dynamic_bsz and config.ptx.train_files and text > budget * num_ranks:
        ranks = f" x {num_ranks} ranks (parallel.sp of actor)" * (num_ranks > 1)
        raise ConfigError(
            f"ptx.max_length={config.ptx.max_length or 'null'}: a row of up to {text} tokens may "
            f"not fit into a pass of {ACTOR}.ppo_max_token_len_per_gpu={budget} tokens{ranks}. Set "
            f"a smaller ptx.max_length, or raise {ACTOR}.ppo_max_token_len_per_gpu."
        )


def _reject_rewards(config: PPOConfig) -> None:
    """Reject rewards, samples and teachers from which no advantage can be estimated."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    # a teacher needs old log-probs to compare with, and settings of rewards need rewards
    if has_teacher(config) and algorithm.rollout_correction.bypass_mode:
        raise ConfigError(
            "distillation compares the teacher with the trainer's own log-probs before the "
            f"update, and {SECTION}.bypass_mode=true computes none. Set it to false."
        )
    act_on_rewards = {
        "algorithm.use_kl_in_reward=true": algorithm.use_kl_in_reward,
        "algorithm.filter_groups.enable=true": algorithm.filter_groups.enable,
        f"algorithm.running_norm={algorithm.running_norm}": bool(algorithm.running_norm),
        f"algorithm.score_clip={algorithm.score_clip}": algorithm.score_clip is not None,
        "reward.overlong_penalty.enable=true": config.reward.overlong_penalty.enable,
    }
    act_on_rewards |= {f"{name}=true": f.resamples for name, f in active_filters(config).items()}
    for setting, is_set in act_on_rewards.items():
        if is_set and has_only_teacher(config):
            raise ConfigError(
                f"{setting} acts on rewards, and distillation.use_task_rewards=false computes "
                f"the advantages only from the teacher. Drop {setting}, or set "
                "distillation.use_task_rewards=true."
            )

    # an estimator that compares samples needs several, which can differ
    name = algorithm.adv_estimator
    compares_samples = _compares_samples(name) and not has_only_teacher(config)
    if rollout.n < 2 and compares_samples:
        raise ConfigError(
            f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, "
            f"but {ROLLOUT}.n={rollout.n} generates only one. Set {ROLLOUT}.n to 2 or more, or "
            "algorithm.adv_estimator=reinforce_plus_plus."
        )
    if not rollout.do_sample and (compares_samples or compares_with_greedy(name)):
        raise ConfigError(
            f"{ROLLOUT}.do_sample=false: all samples of a prompt would be the same greedy "
            f"response, but algorithm.adv_estimator={name} learns from their differences. Set "
            f"{ROLLOUT}.do_sample=true."
        )
    if algorithm.filter_groups.enable and rollout.n < 2:
        raise ConfigError(
            f"algorithm.filter_groups.enable=true with {ROLLOUT}.n={rollout.n}: a group of one "
            "sample cannot be filtered. Set "
            f"{ROLLOUT}.n to 2 or more, or algorithm.filter_groups.enable=false."
        )
    for number, reward in enumerate(config.reward.list):
        if reward.normalize and compares_with_greedy(name):
            raise ConfigError(
                f"reward.list[{number}].normalize=true and algorithm.adv_estimator={name}: the "
                "scores of samples and of greedy responses are compared, but would be normalized "
                "separately. Set normalize=false, or choose another algorithm.adv_estimator."
            )

    # the estimator must read the rewards that other keys change or name
    reads = inspect.signature(ADVANTAGE_ESTIMATORS.look_up(name)).parameters
    changes_rewards = {
        "use_kl_in_reward=true": algorithm.use_kl_in_reward,
        "running_norm=[rewards]": "rewards" in algorithm.running_norm,
        f"score_clip={algorithm.score_clip}": (
            algorithm.score_clip is not None and "token_level_scores" not in reads
        ),
    }
    for setting, is_set in changes_rewards.items():
        if is_set and "token_level_rewards" not in reads:
            in_loss = f", or replace it with {ACTOR}.use_kl_loss=true, for a KL in the loss"
            raise ConfigError(
                f"algorithm.{setting} changes token_level_rewards, which "
                f"algorithm.adv_estimator={name} does not read. Drop algorithm.{setting}"
                f"{in_loss if 'kl' in setting else ''}."
            )

    if algorithm.use_kl_in_reward and algorithm.kl_penalty.endswith("+"):
        raise ConfigError(
            f"algorithm.kl_penalty={algorithm.kl_penalty}: the + changes only the gradient of a "
            "KL in the loss, and a reward has no gradient. Set "
            f"algorithm.kl_penalty={algorithm.kl_penalty.removesuffix('+')}."
        )
    adapts = algorithm.kl_ctrl.type == "adaptive"
    if algorithm.use_kl_in_reward and adapts and algorithm.kl_ctrl.kl_coef == 0:
        raise ConfigError(
            "algorithm.kl_ctrl.kl_coef=0 with algorithm.kl_ctrl.type=adaptive: the controller "
            "multiplies the coefficient, so it stays 0. Set algorithm.kl_ctrl.kl_coef above 0, "
            "such as 0.001."
        )

    names, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    compares_rewards = "named_rewards" in reads
    if compares_rewards and (not names or len(set(names)) < len(names)):
        raise ConfigError(
            f"algorithm.adv_estimator={name} compares several rewards. List each once in "
            f"{GDPO_KEY}, which is {list(names)}. Valid names are seq_reward (the score) and the "
            "other numbers that the reward function returns."
        )
    if compares_rewards and weights is not None and len(weights) != len(names):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights={list(weights)} must have one number per reward of "
            f"{GDPO_KEY}={list(names)}. Set as many, or null for equal weights."
        )


def _compares_samples(name: str) -> bool:
    """Return whether a registered estimator compares the samples of a prompt."""
    estimator = ADVANTAGE_ESTIMATORS.get(name)  # None for a user's function
    return estimator is not None and needs_groups(estimator)


def _reject_losses(config: PPOConfig) -> None:
    """Reject corrections and loss settings that contradict the policy loss."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    # in bypass mode nothing may read old log-probs, and the loss must be one that can be corrected
    correction = algorithm.rollout_correction
    if correction.has_importance_weights or correction.rejects_tokens:
        from workers.losses.correction import RolloutCorrection

        RolloutCorrection.from_config(correction)
    loss = actor.policy_loss.loss_mode
    if correction.bypass_mode:
        if algorithm.use_kl_in_reward or "old_log_probs" in columns_read(algorithm.adv_estimator):
            key = f"adv_estimator={algorithm.adv_estimator}"
            remedy = "choose another estimator"
            if algorithm.use_kl_in_reward:
                key = "use_kl_in_reward=true"
                remedy = f"replace algorithm.{key} with {ACTOR}.use_kl_loss=true"
            raise ConfigError(
                f"algorithm.{key} reads the trainer's own log-probs before the update, and "
                f"{SECTION}.bypass_mode=true computes none. Set {SECTION}.bypass_mode=false, or "
                f"{remedy}."
            )
        if correction.rollout_is_batch_normalize:
            raise ConfigError(
                f"{SECTION}.rollout_is_batch_normalize divides by a mean over the whole batch, "
                "but under bypass_mode weights are computed per micro-batch. Set one of them to "
                "false."
            )
        is_plain = get_policy_loss(loss) is get_policy_loss("reinforce")
        clips = correction.loss_type != "reinforce"
        if not clips and loss != "vanilla" and not is_plain:
            raise ConfigError(
                f"{SECTION}.loss_type=reinforce replaces {LOSS_MODE}={loss} with REINFORCE. "
                f"Set {SECTION}.loss_type=ppo_clip to keep that loss, or {LOSS_MODE}=reinforce."
            )
        if clips and is_plain:
            raise ConfigError(
                f"{LOSS_MODE}={loss} has no ratio that could correct for the rollout, as "
                f"{SECTION}.loss_type=ppo_clip needs. Set {SECTION}.loss_type=reinforce."
            )
        if clips and correction.rollout_is is not None:
            raise ConfigError(
                f"{SECTION}.rollout_is={correction.rollout_is}: under bypass_mode with "
                "loss_type=ppo_clip, the loss already has the ratio to the rollout, and a weight "
                f"would apply it twice. Set {SECTION}.rollout_is=null or "
                f"{SECTION}.loss_type=reinforce."
            )

    # LUSPO weights GSPO by length, which a mean over tokens would cancel
    if loss == "luspo" and actor.loss_agg_mode == "seq-mean-token-mean":
        raise ConfigError(
            f"{LOSS_MODE}=luspo with {ACTOR}.loss_agg_mode=seq-mean-token-mean is gspo. Set "
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum, or {LOSS_MODE}=gspo."
        )
    arguments = {n: a.default for n, a in settable_arguments(get_policy_loss(loss)).items()}
    arguments |= actor.policy_loss.args
    if loss == "clip_cov" and arguments["clip_cov_lb"] >= arguments["clip_cov_ub"]:
        raise ConfigError(
            f"{ACTOR}.policy_loss.args.clip_cov_lb={arguments['clip_cov_lb']:g} and clip_cov_ub="
            f"{arguments['clip_cov_ub']:g}: no covariance lies between them. Set clip_cov_lb below "
            "clip_cov_ub."
        )
    if actor.shuffle and traits_of(get_policy_loss(loss)).choose_tokens is not None:
        raise ConfigError(
            f"{ACTOR}.shuffle=true and {LOSS_MODE}={loss}: this loss compares the tokens of a "
            "mini-batch, chosen once for all ppo_epochs, and shuffling forms different "
            "mini-batches in each epoch. Set shuffle=false, or choose another loss."
        )


def _reject_weights(config: PPOConfig) -> None:
    """Reject settings of weight sync, quantization and reference that contradict each other."""
    policy = config.actor_rollout_ref
    pools = expand_roles(config.role_mapping)
    # a reference that follows the actor has no weights of its own, and is not int8
    every, lora_rank = policy.ref.update_every, policy.model.lora_rank
    if every is not None and policy.ref.model.path is not None:
        raise ConfigError(
            f"{REF}.update_every={every} with {REF}.model.path={policy.ref.model.path}: a "
            "reference that follows the actor begins with the actor's weights, not with those of "
            "another folder. Leave one of the keys out."
        )
    if every is not None and lora_rank > 0:
        raise ConfigError(
            f"{REF}.update_every={every} with {LORA_RANK}={lora_rank}: the reference is the base "
            f"model under the adapters, which must not change. Leave {REF}.update_every out, or "
            f"train every weight ({LORA_RANK}=0)."
        )
    if "ref" in pools and policy.ref.quantization:
        if every is not None:
            raise ConfigError(
                f"{REF}.quantization=int8 with {REF}.update_every={every}: an int8 reference "
                "cannot be updated, because rounding would discard small changes. Leave out "
                "quantization to update the reference, or update_every to keep int8."
            )
        if is_actors_module(policy) and pools["ref"] == pools.get("actor"):
            raise ConfigError(
                f"{REF}.quantization=int8 with {LORA_RANK}={lora_rank}: the reference is the "
                "actor's module with its adapters off, and loads no weights that could be int8. "
                f"Leave out {REF}.quantization, or set role_mapping.ref to another pool."
            )


def check_players(config: PPOConfig, kinds: Collection[Kind]) -> None:
    """Reject players that cannot share a prompt's samples or, in an async run, differ in number."""
    n = config.actor_rollout_ref.rollout.n
    compares_samples = _compares_samples(config.algorithm.adv_estimator)
    for players in [kind.players for kind in kinds if kind.players]:
        problem, count = "", len(players)
        if n % count or (compares_samples and n == count):
            above = f" above {count}" if compares_samples else ""
            problem = (
                f"They share the samples of a prompt, so {ROLLOUT}.n={n} must be a multiple of "
                f"{count}{above}, such as {2 * count}."
            )
        elif hasattr(config, "async_training") and any(len(k.players) != count for k in kinds):
            problem = (
                "In asynchronous training, all environments must have the same number of players."
            )
        if problem:
            raise ConfigError(f"environment: the players are {', '.join(players)}. {problem}")


def check_named_rewards(algorithm: AlgorithmConfig, scored: DataProto) -> None:
    """Raise if these samples lack a reward that a key names."""
    named = [(GDPO_KEY, name) for name in algorithm.gdpo_reward_keys]
    if algorithm.filter_groups.enable:
        named.append((METRIC_KEY, algorithm.filter_groups.metric))
    for key, name in named:
        read_named_reward(scored, name, key)


def check_quantized_device(config: Any) -> None:
    """Reject int8 and fp8 on devices that do not support them, for PPO."""
    device = run_devices(config.trainer).type
    models = declared_models(config, without_users=True).values()
    if any(model.quantization == "int8" for model in models):
        from workers.models.quantize import check_device

        check_device(device)
    for rollout in rollout_configs(config):
        check_quantization(rollout, device)
