"""Compare the loss and estimator of a migrated command with the original framework's functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.tools.check_loss import difference, foreign
from trainer.tools.check_loss.batches import Batch, all_batches
from trainer.tools.check_loss.relations import Pairs, inside
from trainer.tools.check_loss.subject import Subject, match, subject_of
from trainer.tools.migrate.systems import composed
from trainer.tools.migrate.translation import Translation
from verl_like.errors import ConfigError
from workers.config import ActorConfig
from workers.losses.aggregate import AGGREGATIONS, agg_loss
from workers.losses.kl import k3, kl_penalty
from workers.losses.preference import PREFERENCE_LOSSES, compute_reward_loss, get_pairwise_loss
from workers.losses.registry import get_policy_loss

ACTOR = "actor_rollout_ref.actor."
NUMBERS = (0.0, 0.1, 0.2, 1.0, 1.05, 1.2, 3.0, 1e9)
"""Defaults in the frameworks, tried as values of keys."""
KEYS: Mapping[str, tuple[Any, ...]] = {
    "loss_agg_mode": tuple(AGGREGATIONS),
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), NUMBERS),
    **dict.fromkeys(("epsilon", "epsilon_high", "delta", "beta", "label_smoothing"), NUMBERS),
    **dict.fromkeys(("gamma", "lam", "kl_loss_coef"), NUMBERS),
    **dict.fromkeys(("use_bias_correction_kl", "norm_adv_by_std_in_grpo"), (False, True)),
}
"""Settings of both frameworks that may make functions differ, and values to try."""
REASONS: Mapping[str, Callable[[Batch], bool]] = {
    "each of these has a row without a token, which only their function counts": lambda batch: (
        not bool(batch["response_mask"].any(1).all())
    ),
    "in each of these a token's KL exceeds 10, the limit of ours and of verl's": lambda batch: bool(
        (k3(batch["log_prob"] - batch["ref_log_prob"]) >= 10)[batch["response_mask"] > 0].any()
    ),
}
"""A reason why functions may differ for any keys -> whether it applies to a batch."""


def prove(system: str, done: Translation) -> str:
    """Describe on how many batches our functions equal theirs, and which key makes them differ."""
    only_methods = {"algorithm.adv_estimator": "rloo", "loss": "orpo", "reference_free": "True"}
    is_method = any(done.settings.get(key) == value for key, value in only_methods.items())
    if system not in foreign.VERSIONS or (system == "trl" and is_method):
        return f"Proof: {system} has no function of this loss that can be called by itself"
    config: Any = composed(done)
    original = {key: yaml.safe_load(text) for key, text in done.original.items()}
    fields = {k.removeprefix(ACTOR).removeprefix("policy_loss."): v for k, v in original.items()}
    fields.pop("max_completion_length", None)  # a constant factor, with another value here
    make, default = OURS.get(done.program, (_policy, "vanilla" if system == "verl" else "dapo"))
    section = config.actor_rollout_ref.actor if make is _policy else config
    default = "kto" if getattr(config, "loss", "") == "kto" else default
    name = fields.get("loss_mode", fields.get("loss_type", default))
    is_known = system == "verl" or any(name in names for names in foreign.TRAINERS.values())
    name = f"{system}:{name if is_known else default}"
    lines = ["Proof:", f"loss {name}: {_compared(make, section, name, fields)}"]
    if system == "verl" and make is _policy:
        fields = {key.removeprefix("algorithm."): value for key, value in original.items()}
        name = f"verl:{fields.pop('adv_estimator', 'gae')}"
        compared = _compared(_estimator, config.algorithm, name, fields)
        lines.append(f"estimator {name}: {compared}")
    return "\n  ".join(lines)


def _sft(config: Any) -> Subject:
    return subject_of("lm", "policy")


def _policy(actor: ActorConfig) -> Subject:
    """Return the run's policy loss with its KL."""
    settings = {**actor.policy_loss.args, "config": actor, "loss_agg_mode": actor.loss_agg_mode}
    loss = get_policy_loss(actor.policy_loss.loss_mode)
    subject = match(loss, "ours", "policy", {**settings, "chosen_tokens": None})
    return foreign.with_actor(subject, actor, kl_penalty, agg_loss)


def _estimator(algorithm: Any) -> Subject:
    keys = {key: getattr(algorithm, key) for key in ("gamma", "lam", "norm_adv_by_std_in_grpo")}
    keys |= algorithm.args
    estimator = ADVANTAGE_ESTIMATORS.look_up(algorithm.adv_estimator)
    return match(estimator, "ours", "estimator", keys)


def _preference(config: Any) -> Subject:
    settings = {**vars(config), "margin": torch.zeros(())}  # TRL's pairs have none
    loss = match(PREFERENCE_LOSSES.look_up(config.loss), "ours", "preference", settings)
    return replace(loss, call=lambda batch: loss.call(batch).mean())


def _reward(config: Any) -> Subject:
    def loss(log_probs: Tensor, margin: Tensor) -> Tensor:
        pairwise = get_pairwise_loss(config.loss)
        return compute_reward_loss(pairwise, log_probs, margin, config.center_coef).mean()

    return match(loss, "ours", "preference", {})


OURS = {"sft": (_sft, "sft"), "reward-model": (_reward, "reward"), "dpo": (_preference, "dpo")}
"""Our command without a policy loss -> our loss, and the name of TRL's."""


def _compared(
    make: Callable[[Any], Subject], section: Any, name: str, fields: Mapping[str, Any]
) -> str:
    """Compare two functions, and describe which change of one key would make them equal."""
    most, first, is_explained = _compare(make(section), name, fields)
    if is_explained:
        return first
    closest, ours = "No change of one key brings them closer", vars(section)
    numbers = {number for number in fields.values() if isinstance(number, float)}
    for key, values in KEYS.items():
        for value in [*values, *(numbers if 0.0 in values else ())]:
            change = {key: value}
            if key == "use_bias_correction_kl" and "kl_loss_type" in ours:
                change["kl_loss_type"] = section.kl_loss_type.removesuffix("+")
            changed = replace(section, **{k: change[k] for k in change if k in ours})
            equal, words, _ = _compare(make(changed), name, {**fields, key: value})
            if equal > most:
                most, closest = equal, f"With {key}={value} they are {words}"
    return f"{first}. {closest}"


def _compare(ours: Subject, name: str, fields: Mapping[str, Any]) -> tuple[int, str, bool]:
    """Return the number of equal batches, a text, and whether all differences are explained."""
    theirs = foreign.subject_of(name, ours.kind, **fields)

    def as_theirs(subject: Subject, batch: Batch) -> Pairs:
        yield "as theirs", inside(theirs, batch), inside(subject, batch)

    results, rejection = list[tuple[Batch, str]](), ConfigError()
    for batch in all_batches():
        if theirs.equal_cuts and ours.kind == "policy":
            mask = batch["response_mask"]
            if not bool(mask.any(1).all()):
                continue  # TRL has no row without a token, and one advantage per row
            means = batch["advantages"].sum(1, keepdim=True) / mask.sum(1, keepdim=True)
            batch = {**batch, "advantages": means * mask}
        try:
            results.append((batch, difference(ours, as_theirs, batch)))
        except ConfigError as error:
            rejection = error  # a function cannot take such a batch
    if not results:
        raise rejection
    different = [batch for batch, words in results if words]
    equal = len(results) - len(different)
    words = f"equal to 1e-6 on {equal} batches"
    if not different:
        return equal, words, True
    reasons = [reason for reason in REASONS if all(map(REASONS[reason], different))]
    reasons = reasons if ours.kind == "policy" else []
    words += f"; different on {len(different)}: {next(words for _, words in results if words)}"
    return equal, " ".join([words, *map("({})".format, reasons)]), bool(reasons)
