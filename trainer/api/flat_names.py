"""Flat names of the most common keys: `PPO(..., lr=1e-6, n=8)`. Other keys have dotted names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from trainer.config.key_errors import SYNONYMS, no_such_key
from trainer.config.schema import Recipe
from trainer.config.settings import flat_settings, unknown_key
from verl_like.errors import ConfigError, did_you_mean, nearest

Section = Mapping[str, Any]
"""Keys of a section of the configuration; a value may be a section, too."""


class RunKeys(TypedDict, total=False):
    """Keywords of every recipe that are not parameters of its class."""

    placement: str
    data: Section
    trainer: Section
    parallel: Section
    ray: Section
    timeouts: Section
    resource_pool_spec: Mapping[str, Sequence[int]]
    role_mapping: Mapping[str, str]
    role_workers: Mapping[str, str]
    cpus_per_process: int | None
    pool_resources: Section
    learning_rate: float
    num_train_epochs: int
    output_dir: str
    save_steps: int
    eval_steps: int
    max_steps: int
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any


class PPOKeys(RunKeys, total=False):
    """Keywords of PPO and its variants that are not parameters of the class."""

    algorithm: str | Section
    correction: str
    async_training: Section
    environment: str | type | Callable[..., Any] | Section
    actor_rollout_ref: Section
    critic: Section
    ptx: Section
    distillation: Section
    reward_funcs: Any
    num_generations: int
    max_completion_length: int
    beta: float
    epsilon: float


class RowKeys(RunKeys, total=False):
    """Keywords of sft, reward-model and dpo that are not parameters of the class."""

    model: Any
    optim: Section
    grad_clip: float
    checkpoint: Section
    loss: str
    center_coef: float
    score_at: str | None
    beta: float
    label_smoothing: float
    simpo_gamma: float
    orpo_lambda: float
    desirable_weight: float
    undesirable_weight: float
    sft_coef: float
    sft_agg_mode: str
    reference_free: bool
    ref: Section


RUN_NAMES = {
    "batch_size": "data.train_batch_size",
    "epochs": "trainer.total_epochs",
    "seed": "trainer.seed",
    "devices": "trainer.n_gpus_per_node",
    "save_to": "trainer.default_local_dir",
    "save_every": "trainer.save_freq",
    "validate_every": "trainer.test_freq",
    "logger": "trainer.logger",
}
PPO_NAMES = {
    "lr": "actor_rollout_ref.actor.optim.lr",
    "critic_lr": "critic.optim.lr",
    "n": "actor_rollout_ref.rollout.n",
    "mini_batch_size": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
    "temperature": "actor_rollout_ref.rollout.temperature",
    "top_p": "actor_rollout_ref.rollout.top_p",
    "kl_loss_coef": "actor_rollout_ref.actor.kl_loss_coef",
    "clip_ratio": "actor_rollout_ref.actor.clip_ratio",
    "lora_rank": "actor_rollout_ref.model.lora_rank",
    "lora_alpha": "actor_rollout_ref.model.lora_alpha",
    "engine": "actor_rollout_ref.rollout.name",
} | RUN_NAMES
ROW_NAMES = {
    "lr": "optim.lr",
    "max_length": "data.max_length",
    "lora_rank": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
} | RUN_NAMES
TRL_NAMES = {
    "beta": "kl_loss_coef",
    "epsilon": "clip_ratio",
    "eval_steps": "validate_every",
    "learning_rate": "lr",
    "max_completion_length": "max_response_length",
    "max_steps": "trainer.total_training_steps",
    "num_generations": "n",
    "num_train_epochs": "epochs",
    "output_dir": "save_to",
    "save_steps": "save_every",
}
"""Accepted names of TRL -> this project's flat name or key for the same value."""
TRL_PPO_OBJECTS = {
    "train_dataset": "prompts",
    "eval_dataset": "val_prompts",
    "processing_class": "tokenizer",
    "reward_funcs": "reward",
}
"""TRL's name -> our name of an argument of PPO that is not a setting."""
TRL_ROW_OBJECTS = {
    "train_dataset": "rows",
    "eval_dataset": "val_rows",
    "processing_class": "tokenizer",
}
"""TRL's name -> our name of an argument of sft, reward-model and dpo that is not a setting."""
LIKE_TRL = {"report_to": "logger"}
"""TRL's name -> a flat name whose values mean something else; the error for TRL's suggests it."""
TRL_BATCH_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""TRL's names whose product, times its processes, is a batch."""
SWITCHES = {"actor_rollout_ref.actor.kl_loss_coef": "actor_rollout_ref.actor.use_kl_loss"}
"""Key of a coefficient -> the key that enables its loss term; a coefficient of 0 disables it."""


def passed_arguments(names: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with these names that are not None; `values` is a call's `locals()`."""
    return {name: values[name] for name in names if values[name] is not None}


def trl_names(names: Mapping[str, str]) -> list[str]:
    """Return the names of TRL that a recipe with these flat names accepts for its settings."""
    return [trl for trl, ours in TRL_NAMES.items() if ours in names or "." in ours]


def with_our_names(keywords: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    """Return the keywords with TRL's names replaced by ours."""
    result: dict[str, Any] = {}
    for name, value in keywords.items():
        target = ours.get(name, name)
        if target != name and target in keywords:
            raise ConfigError(f"{name} and {target} are two names of the same setting. Set one.")
        result[target] = value
    return result


def settings_of(
    keywords: Mapping[str, Any], names: Mapping[str, str], recipe: Recipe[Any]
) -> dict[str, Any]:
    """Return a call's keywords (flat names, sections as dicts, dotted keys) as dotted keys."""
    keywords = with_our_names(keywords, {name: TRL_NAMES[name] for name in trl_names(names)})
    others = {name: value for name, value in keywords.items() if name not in names}
    for name in others:
        if "." not in name and unknown_key(name, recipe):
            raise ConfigError(_unknown(name, names, recipe))

    settings = flat_settings(recipe.schema, others)
    for name in keywords.keys() & names.keys():
        for key, value in _keys_of(names[name], keywords[name]):
            if key in settings and settings[key] != value:
                raise ConfigError(
                    f"{name}={keywords[name]!r} sets {key}={value!r}, but {key}={settings[key]!r} "
                    f"is also set. Set only {name}, or only {key}."
                )
            settings[key] = value
    return settings


def _keys_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if key in SWITCHES:
        yield SWITCHES[key], value != 0
    if key not in SWITCHES or value != 0:
        yield key, value


def _unknown(name: str, names: Mapping[str, str], recipe: Recipe[Any]) -> str:
    """Return the error text, which suggests our name for a TRL name, or the nearest flat name."""
    targets = (name, SYNONYMS.get(name, ""))
    same = [f for f, key in names.items() if key in targets or key.rpartition(".")[2] in targets]
    if name == "steps":
        hint = " Pass it to fit, as in fit(steps=5)."
    elif name == "args":
        hint = " TRL's args=...Config(...) is not read: pass its fields as keywords."
    elif name in TRL_BATCH_SIZES:
        rows, per_prompt = ("completions", " / num_generations") if "n" in names else ("rows", "")
        hint = (
            f" TRL counts {rows} of one process. Here batch_size is for all: batch_size = "
            f"{' * '.join(TRL_BATCH_SIZES)} * processes{per_prompt}."
        )
    elif LIKE_TRL.get(name) in names:
        hint = f" TRL's {name} is {LIKE_TRL[name]!r} here."
    else:
        known = [*names, *trl_names(names)]
        hint = did_you_mean(same[:1]) or nearest(name, known)
    text = f"there is no key {name!r}.{hint}" if hint else no_such_key(name, recipe)
    return f"{text} Keywords: {', '.join(names)}. All keys: verl-like {recipe.name} --cfg all"
