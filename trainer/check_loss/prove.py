"""The loss and estimator of a migrated command next to the original framework's own functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor

from trainer.check_loss import difference, foreign
from trainer.check_loss.batches import ESTIMATOR, POLICY, PREFERENCE, Batch, all_batches
from trainer.check_loss.relations import Relation, inside
from trainer.check_loss.subject import LOSS_SCALE_FACTOR, Subject, match, subject_of
from trainer.migrate.systems import composed
from trainer.migrate.translation import Translation
from trainer.ppo.compute_advantage import get_estimator
from verl_like.errors import ConfigError
from workers.config import ActorConfig
from workers.losses.aggregate import AGGREGATIONS, Denominators, agg_loss
from workers.losses.kl import kl_penalty
from workers.losses.pairwise import compute_reward_loss, get_pairwise_loss
from workers.losses.preference.registry import PREFERENCE_LOSSES
from workers.losses.registry import get_policy_loss

Make = Callable[[Any], Subject]
"""(section of our configuration) -> the function of the run."""
ACTOR = "actor_rollout_ref.actor."
NUMBERS = (0.0, 0.1, 0.2, 1.0, 1.05, 1.2, 3.0, 1e9)
"""Defaults of the frameworks, which a key may have had."""
KEYS: Mapping[str, tuple[Any, ...]] = {
    "loss_agg_mode": tuple(AGGREGATIONS),
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), NUMBERS),
    **dict.fromkeys(("epsilon", "epsilon_high", "delta", "beta", "label_smoothing"), NUMBERS),
    **dict.fromkeys(("gamma", "lam", "kl_loss_coef"), NUMBERS),
    **dict.fromkeys(("use_bias_correction_kl", "norm_adv_by_std_in_grpo"), (False, True)),
}
"""Settings of both frameworks that may make functions differ, and values to try."""


def prove(system: str, done: Translation) -> str:
    """Return on how many batches both are equal, or the key that makes them differ."""
    if system not in foreign.VERSIONS:
        return f"Proof: {system} has no functions that can be called by themselves"
    config: Any = composed(done)
    given = {key: yaml.safe_load(text) for key, text in done.given.items()}
    fields = {k.removeprefix(ACTOR).removeprefix("policy_loss."): v for k, v in given.items()}
    fields.pop("max_completion_length", None)  # a constant factor, which has another value here
    default, section, make = {
        "sft": ("sft", config, lambda config: subject_of("lm", POLICY)),
        "reward-model": ("reward", config, _reward),
        "dpo": ("kto" if getattr(config, "loss", "") == "kto" else "dpo", config, _preference),
    }.get(done.program) or ("dapo", config.actor_rollout_ref.actor, _policy)
    default = "vanilla" if system == "verl" and make is _policy else default
    name = fields.get("loss_mode", fields.get("loss_type", default))
    name = name if system == "verl" or name in foreign.TRAINERS else default
    lines = [f"loss {_compared(make, section, f'{system}:{name}', fields)}"]
    if system == "verl" and make is _policy:
        fields = {key.removeprefix("algorithm."): value for key, value in given.items()}
        name = f"verl:{fields.pop('adv_estimator', 'gae')}"
        lines.append(f"estimator {_compared(_estimator, config.algorithm, name, fields)}")
    return "\n  ".join(["Proof:", *lines])


def _policy(actor: ActorConfig) -> Subject:
    """Return the run's policy loss with its KL."""
    settings = {"config": actor, "loss_scale_factor": actor.loss_scale_factor or LOSS_SCALE_FACTOR}
    settings |= {**actor.policy_loss.args, "loss_agg_mode": actor.loss_agg_mode}
    settings |= {"chosen_tokens": None}
    policy = match(get_policy_loss(actor.policy_loss.loss_mode), "ours", POLICY, settings)

    def call(batch: Batch) -> Tensor:
        loss: Tensor = policy.call(batch)[0]
        if actor.use_kl_loss:
            counts: Any = {key: {**batch, **settings}[key] for key in Denominators.__annotations__}
            kl = kl_penalty(batch["log_prob"], batch["ref_log_prob"], actor.kl_loss_type)
            mask = batch["response_mask"]
            loss = loss + actor.kl_loss_coef * agg_loss(kl, mask, actor.loss_agg_mode, **counts)
        return loss

    return replace(policy, call=call)


def _estimator(algorithm: Any) -> Subject:
    keys = {key: getattr(algorithm, key) for key in ("gamma", "lam", "norm_adv_by_std_in_grpo")}
    keys |= algorithm.args
    return match(get_estimator(algorithm.adv_estimator), "ours", ESTIMATOR, keys)


def _preference(config: Any) -> Subject:
    settings = {**vars(config), "margin": torch.zeros(())}  # TRL's pairs have none
    loss = match(PREFERENCE_LOSSES.look_up(config.loss), "ours", PREFERENCE, settings)
    return replace(loss, call=lambda batch: loss.call(batch).mean())


def _reward(config: Any) -> Subject:
    def loss(log_probs: Tensor, margin: Tensor) -> Tensor:
        pairwise = get_pairwise_loss(config.loss)
        return compute_reward_loss(pairwise, log_probs, margin, config.center_coef).mean()

    return match(loss, "ours", PREFERENCE, {})


def _compared(make: Make, section: Any, name: str, fields: Mapping[str, Any]) -> str:
    """Return how two functions compare, and which change of one key would make them equal."""
    equal, words = _equal(make(section), name, fields)
    if "different" in words:
        results = {}
        numbers = {number for number in fields.values() if isinstance(number, float)}
        for key in KEYS:
            for value in [*KEYS[key], *(numbers if 0.0 in KEYS[key] else ())]:
                change = {key: value}
                if key == "use_bias_correction_kl" and "kl_loss_type" in vars(section):
                    change["kl_loss_type"] = section.kl_loss_type.removesuffix("+")
                ours = make(
                    replace(section, **{k: change[k] for k in change if k in vars(section)})
                )
                results[f"{key}={value}"] = _equal(ours, name, {**fields, key: value})
        best = max(results, key=lambda key: results[key][0])
        closer = f"With {best} they are {results[best][1]}"
        none = "No change of one key brings them closer"
        words += f". {closer if results[best][0] > equal else none}"
    return f"{name}: {words}"


def _equal(ours: Subject, name: str, fields: Mapping[str, Any]) -> tuple[int, str]:
    """Return on how many batches two functions are equal, forward and backward; also in words."""
    theirs = foreign.subject_of(name, ours.kind, is_strict=False, **fields)

    def compare(subject: Subject, batch: Batch) -> Iterator[tuple[str, Any, Any]]:
        yield "as theirs", inside(theirs, batch), inside(subject, batch)

    equal, differences, refusal = 0, list[str](), ConfigError()
    for batch in all_batches(ours.kind):
        mask = batch.get("response_mask", torch.ones(1, 1))
        if theirs.equal_cuts and "advantages" in batch:  # TRL has one advantage per row
            means = batch["advantages"].sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(1)
            batch = {**batch, "advantages": means * mask}
        if theirs.equal_cuts and not bool(mask.any(1).all()):
            continue  # TRL has no row without a token
        try:
            theirs.measure(batch)
        except ConfigError as error:
            refusal = error  # it cannot take such a batch
            continue
        words = difference(ours, Relation(compare), batch)
        equal += not words
        differences += [words] if words else []
    if not equal and not differences:
        raise refusal
    words = f"; different on {len(differences)}: {differences[0]}" if differences else ""
    return equal, f"equal to 1e-6 on {equal} batches{words}"
