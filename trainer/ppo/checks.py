"""PPO's rules between fields: sizes that must divide, parts that must exist, clashing settings.

The rules of one field stand at the field, and `trainer.config.checks` reads them there.
"""

from __future__ import annotations

import inspect
from typing import Any

from trainer.config.checks import check_ranks
from trainer.config.offload import device_type_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, needs_groups
from trainer.ppo.compute_advantage import GDPO_KEY, compares_with_greedy, get_estimator
from trainer.ppo.config import AlgorithmConfig, PPOConfig
from trainer.ppo.contradictions import log_warnings, refuse_contradictions
from trainer.ppo.correct_rollout import check_correction
from trainer.ppo.distillation import check_distillation
from trainer.ppo.dynamic_sampling import METRIC_KEY
from trainer.ppo.rewards import get_kl_controller
from trainer.ppo.roles import models_of, quantizations_of
from trainer.ppo.update_samples import longest_row
from trainer.rollouts.reward_checks import check_rewards
from trainer.rollouts.samples import read_named_reward
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from workers.config import FrozenFSDPConfig, FSDPConfig, critic_optim
from workers.config.passes import tokens_per_pass
from workers.losses.registry import facts_of, get_policy_loss
from workers.models.quantize import check_device
from workers.rollout.sampling_settings import check_sampling
from workers.training.schedules import check_optim


def validate(config: PPOConfig) -> None:
    """Refuse settings that cannot work together, and warn of those that contradict themselves."""
    refuse(config)
    log_warnings(config)


def refuse(config: PPOConfig) -> None:
    """Refuse, with the numbers and the way out, settings that cannot work together."""
    _check_buckets_to_drop(config)
    get_kl_controller(config.algorithm.kl_ctrl)
    check_rewards(config)
    _check_normalised_rewards(config)
    _check_data(config)
    _check_mini_batches(config)
    _check_token_budgets(config)
    _check_ptx(config)
    check_distillation(config)
    _check_groups(config)
    check_correction(config)
    _check_estimator(config)
    _check_named_rewards(config)
    _check_lengths_count(config)
    _check_token_choice(config)
    _check_quantization(config)
    _check_sharding(config)
    _check_optims(config)
    _check_reference(config)
    refuse_contradictions(config)
    check_sampling(config.actor_rollout_ref.rollout, config.data.max_response_length)


def _check_buckets_to_drop(config: PPOConfig) -> None:
    """A rollout in the actor's own processes is handed the weights: there are no buckets."""
    if config.chaos.drop_bucket == 0:
        return
    pools = expand_roles(config.role_mapping)
    receivers = [role for role in pools if role.startswith("rollout")]
    if "actor" not in pools or not any(pools[role] != pools["actor"] for role in receivers):
        raise ConfigError(
            f"chaos.drop_bucket={config.chaos.drop_bucket:g}: in this run no weights travel "
            "between processes. They do where a rollout has another pool than the actor: "
            "placement=standalone, or `verl-like detached`."
        )


def _check_normalised_rewards(config: PPOConfig) -> None:
    """Scores that are compared with each other are normalised together."""
    for number, reward in enumerate(config.rewards):
        estimator = config.algorithm.adv_estimator
        if reward.normalize and compares_with_greedy(estimator):
            raise ConfigError(
                f"rewards[{number}].normalize=true and algorithm.adv_estimator={estimator}: the "
                "scores of samples and of greedy answers are compared, and would be normalised "
                "apart. Drop one."
            )


def _check_data(config: PPOConfig) -> None:
    custom = config.data.custom_cls
    if custom.path and not custom.name:
        raise ConfigError(f"data.custom_cls.path={custom.path} needs data.custom_cls.name.")


def _check_mini_batches(config: PPOConfig) -> None:
    """A step's prompts are cut into whole mini-batches."""
    total = config.data.train_batch_size
    policy, critic = config.actor_rollout_ref, config.critic
    mini_batches = {
        "actor_rollout_ref.actor.ppo_mini_batch_size": policy.actor.ppo_mini_batch_size,
        "critic.ppo_mini_batch_size": critic.ppo_mini_batch_size,
    }
    for key, size in mini_batches.items():
        if size is None or (size > 0 and total % size == 0):
            continue
        near = " and ".join(map(str, _nearest_divisors(total, size)))
        raise ConfigError(
            f"{key}={size} prompts does not divide data.train_batch_size={total} prompts; "
            f"the nearest values that do are {near}."
        )
    _check_last_step(config, mini_batches)


def _check_last_step(config: PPOConfig, mini_batches: dict[str, int | None]) -> None:
    """The prompts that `data.total_prompts` leaves for a last step are whole mini-batches."""
    data, given = config.data, f"data.total_prompts={config.data.total_prompts}"
    if data.total_prompts is None:
        return
    if config.trainer.total_training_steps is not None or config.algorithm.filter_groups.enable:
        raise ConfigError(
            f"{given} says how long the run is; with trainer.total_training_steps it would be said "
            "twice, and with algorithm.filter_groups.enable a step draws as many prompts as it "
            "takes. Drop one."
        )

    left = data.total_prompts % data.train_batch_size
    for key, size in mini_batches.items():
        if size is not None and left % size:
            raise ConfigError(
                f"{given} leaves {left} prompts for the last step "
                f"(data.train_batch_size={data.train_batch_size}), which are no whole mini-batches "
                f"of {key}={size}; {data.total_prompts - left % size} prompts would be, or a size "
                f"that divides {left}."
            )


def _nearest_divisors(total: int, size: int) -> list[int]:
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    by_distance = sorted(divisors, key=lambda divisor: abs(divisor - size))
    return sorted(by_distance[:2])


def _check_token_budgets(config: PPOConfig) -> None:
    """A micro-batch holds at least one sample of full length."""
    policy, critic = config.actor_rollout_ref, config.critic
    if not policy.actor.use_dynamic_bsz:
        return

    longest = config.data.max_prompt_length + config.data.max_response_length
    budgets = {
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": policy.actor.ppo_max_token_len_per_gpu,
        "critic.ppo_max_token_len_per_gpu": critic.ppo_max_token_len_per_gpu,
    }
    for key, tokens in budgets.items():
        if tokens is not None and tokens < longest:
            raise ConfigError(
                f"{key}={tokens} tokens is less than one sample of data.max_prompt_length + "
                f"data.max_response_length = {longest} tokens; raise it to that."
            )


def _check_ptx(config: PPOConfig) -> None:
    """A row of PTX fits into a pass."""
    actor, longest = config.actor_rollout_ref.actor, longest_row(config)
    if config.ptx.train_files and actor.use_dynamic_bsz:
        budget = tokens_per_pass(config)
        if longest > budget:
            raise ConfigError(
                f"ptx.max_length={longest} tokens does not fit into a pass of "
                f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget} tokens; lower the "
                "one, or raise the other."
            )


def _check_groups(config: PPOConfig) -> None:
    """An estimator that compares a prompt's samples has more than one of them."""
    name, num_samples = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    estimator = ADVANTAGE_ESTIMATORS.get(name)  # of the user's own, by its path, nothing is known
    if num_samples < 2 and estimator is not None and needs_groups(estimator):
        raise ConfigError(
            f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, and "
            f"actor_rollout_ref.rollout.n={num_samples} makes one: its advantage would be its raw "
            "score. Set actor_rollout_ref.rollout.n to 2 or more, or take reinforce_plus_plus."
        )


def _check_estimator(config: PPOConfig) -> None:
    """What is done to rewards reaches the estimator, and its discounts are shares."""
    algorithm = config.algorithm
    reads = inspect.signature(get_estimator(algorithm.adv_estimator)).parameters
    needed = {
        "use_kl_in_reward=true": (algorithm.use_kl_in_reward, ["token_level_rewards"]),
        "running_norm=[rewards]": ("rewards" in algorithm.running_norm, ["token_level_rewards"]),
        f"score_clip={algorithm.score_clip}": (
            algorithm.score_clip is not None,
            ["token_level_rewards", "token_level_scores"],
        ),
    }
    for setting, (is_set, columns) in needed.items():
        if is_set and not any(column in reads for column in columns):
            raise ConfigError(
                f"algorithm.{setting} changes {columns[0]}, which algorithm.adv_estimator="
                f"{algorithm.adv_estimator} does not read. Drop it; a KL can stand in the loss: "
                "actor_rollout_ref.actor.use_kl_loss=true."
            )


def _check_named_rewards(config: PPOConfig) -> None:
    """GDPO has rewards to compare, and a weight for each if it has any."""
    algorithm = config.algorithm
    names, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if "named_rewards" not in inspect.signature(get_estimator(algorithm.adv_estimator)).parameters:
        return
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares several rewards: name "
            f"each once in algorithm.gdpo_reward_keys, which is {list(names)}. There are "
            "seq_reward, the score, and the numbers that the reward function returns beside it."
        )
    if weights is not None and len(weights) != len(names):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for the {len(names)} "
            "rewards of algorithm.gdpo_reward_keys; give each one, or null to count each once."
        )


def check_named_rewards(algorithm: AlgorithmConfig, scored: DataProto) -> None:
    """Refuse names of rewards that these samples have no number for."""
    named = [(GDPO_KEY, name) for name in algorithm.gdpo_reward_keys]
    if algorithm.filter_groups.enable:
        named.append((METRIC_KEY, algorithm.filter_groups.metric))
    for key, name in named:
        read_named_reward(scored, name, key)


def _check_lengths_count(config: PPOConfig) -> None:
    """LUSPO is GSPO with lengths that count: a mean over tokens takes them out again."""
    actor = config.actor_rollout_ref.actor
    if actor.policy_loss.loss_mode == "luspo" and actor.loss_agg_mode == "seq-mean-token-mean":
        raise ConfigError(
            "actor_rollout_ref.actor.policy_loss.loss_mode=luspo with loss_agg_mode="
            "seq-mean-token-mean is gspo: set loss_agg_mode=seq-mean-token-sum, or loss_mode=gspo."
        )


def _check_token_choice(config: PPOConfig) -> None:
    """Tokens are chosen within a mini-batch, so every pass has the same ones."""
    actor = config.actor_rollout_ref.actor
    loss_mode = actor.policy_loss.loss_mode
    if actor.shuffle and facts_of(get_policy_loss(loss_mode)).choose_tokens is not None:
        raise ConfigError(
            "actor_rollout_ref.actor.shuffle=true and "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}: this loss compares the "
            "tokens of a mini-batch, chosen once for all passes, and shuffling makes other "
            "mini-batches in every pass. Drop one of them."
        )


def _check_sharding(config: PPOConfig) -> None:
    """A strategy fits the `fsdp_config` beside it and the ranks of its role."""
    for role, model in models_of(config, without_users=True).items():
        check_ranks(config, role, model.sharding)


def _check_optims(config: PPOConfig) -> None:
    """Actor and critic can take steps, and their learning rates can be computed."""
    check_optim(config.actor_rollout_ref.actor.optim, "actor_rollout_ref.actor.optim")
    check_optim(critic_optim(config), "critic.optim")


def _check_reference(config: PPOConfig) -> None:
    """A reference that follows the actor has weights of its own."""
    ref, lora_rank = config.actor_rollout_ref.ref, config.actor_rollout_ref.model.lora_rank
    if ref.update_every is None:
        return
    if lora_rank > 0:
        raise ConfigError(
            f"actor_rollout_ref.ref.update_every={ref.update_every} with model.lora_rank="
            f"{lora_rank}: the reference is the base that the adapters stand on, which must not "
            "move. Leave update_every out, or train every weight (lora_rank=0)."
        )


REF = "actor_rollout_ref.ref"


def _check_quantization(config: PPOConfig) -> None:
    """Refuse int8 on devices that cannot, beside sharding, and for weights that move."""
    check_quantized_device(config)
    for role, model in models_of(config, without_users=True).items():
        if model.quantization:
            _check_whole(model.section, model.fsdp)
            if role == "ref":
                _check_quantized_reference(config)


def check_quantized_device(config: Any) -> None:
    """Refuse int8 on devices that cannot, of PPO or of best-of-n."""
    if any(quantizations_of(config).values()):
        check_device(device_type_of(config.trainer))


def _check_whole(section: str, sharding: FSDPConfig | FrozenFSDPConfig) -> None:
    """Int8 weights are whole on every rank, and stay where they are."""
    for name, is_off in (
        (f"fsdp_size={sharding.fsdp_size}", sharding.fsdp_size in (-1, 1)),
        ("param_offload=true", not sharding.param_offload),
    ):
        if not is_off:
            raise ConfigError(
                f"{section}.quantization=int8 keeps the whole model, a quarter of its float32 size,"
                f" on every rank: leave out {section}.fsdp_config.{name}, or the quantization."
            )


def _check_quantized_reference(config: PPOConfig) -> None:
    """A quantised reference has frozen weights of its own."""
    policy, pools = config.actor_rollout_ref, expand_roles(config.role_mapping)
    if policy.ref.update_every is not None:
        raise ConfigError(
            f"{REF}.quantization=int8 with {REF}.update_every={policy.ref.update_every}: weights "
            "that move are not held as int8, which would round their steps away. Drop one."
        )
    if policy.model.lora_rank > 0 and pools["ref"] == pools["actor"]:
        raise ConfigError(
            f"{REF}.quantization=int8 with model.lora_rank={policy.model.lora_rank}: the reference "
            "is the actor's own module with its adapters off, and loads nothing that could be "
            "int8. Leave the quantization out, or give role_mapping.ref another pool."
        )
