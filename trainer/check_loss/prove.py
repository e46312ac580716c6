"""The loss and estimator of a migrated command next to the original framework's own functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from torch import Tensor

from trainer.check_loss import difference, foreign
from trainer.check_loss.batches import ESTIMATOR, POLICY, Batch, all_batches
from trainer.check_loss.relations import Relation, inside
from trainer.check_loss.subject import LOSS_SCALE_FACTOR, Subject, match
from trainer.migrate.systems import composed
from trainer.migrate.translation import Translation
from trainer.ppo.compute_advantage import get_estimator
from trainer.ppo.config import PPOConfig
from verl_like.errors import ConfigError
from workers.config import ActorConfig
from workers.losses.aggregate import AGGREGATIONS, agg_loss
from workers.losses.kl import kl_penalty
from workers.losses.registry import GIVEN, get_policy_loss

ACTOR = "actor_rollout_ref.actor"
CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
OF_TRL = (
    *("epsilon", "epsilon_high", "delta", "beta", "importance_sampling_level"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "use_bias_correction_kl"),
)
"""Fields of TRL's that its loss reads."""
OF_TRL_ALONE = [{"use_bias_correction_kl": False}]
"""Fields that have no key here, and the values that are the same as none."""
OF_ESTIMATOR = {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True}
"""Settings of estimators, and verl's defaults."""
NUMBERS = (0.0, 0.2, 1.0, 1.05, 3.0, 1e9)
"""Defaults of both frameworks, which a key may have had."""


def prove(system: str, done: Translation) -> str:
    """Return on how many batches both are equal, or the key that makes them differ."""
    if system not in ("trl", "verl") or done.program not in ("ppo", "async"):
        return f"Proof: {system} has no policy loss for {done.program} that can be called by itself"
    config = cast(PPOConfig, composed(done))
    given = {key: yaml.safe_load(value) for key, value in done.given.items()}
    if system == "trl":
        fields = {name: given[name] for name in OF_TRL if name in given}
        name = f"trl:{given.get('loss_type', 'dapo')}"
        return f"Proof:\n  loss {_loss(name, fields, config, OF_TRL_ALONE)}"
    of_actor = {key.removeprefix(f"{ACTOR}."): value for key, value in given.items()}
    fields = {
        name: of_actor[name]
        for name in (*CLIP, "tau_pos", "tau_neg", "loss_agg_mode")
        if name in of_actor
    }
    fields |= {
        key.removeprefix("policy_loss."): value
        for key, value in of_actor.items()
        if key.startswith("policy_loss.")
    }
    loss = _loss(f"verl:{fields.pop('loss_mode', 'vanilla')}", fields, config, [])
    name = f"verl:{given.get('algorithm.adv_estimator', 'gae')}"
    theirs = {key: given.get(f"algorithm.{key}", OF_ESTIMATOR[key]) for key in OF_ESTIMATOR}
    estimator = foreign.subject_of(name, ESTIMATOR, **theirs)
    keys = {key: getattr(config.algorithm, key) for key in OF_ESTIMATOR}
    ours = match(get_estimator(config.algorithm.adv_estimator), "ours", ESTIMATOR, keys)
    return f"Proof:\n  loss {loss}\n  estimator {name}: {_compared(ours, estimator)[1]}"


def _loss(
    name: str, fields: dict[str, Any], config: PPOConfig, theirs_alone: Sequence[dict[str, Any]]
) -> str:
    """Return how the losses compare, and which change of one key would make them equal."""
    theirs = foreign.subject_of(name, POLICY, **fields)
    actor = config.actor_rollout_ref.actor
    num_equal, words = _compared(_ours(actor, theirs), theirs)
    if "different" not in words:
        return f"{name}: {words}"
    numbers = {*NUMBERS, *(value for value in fields.values() if isinstance(value, float))}
    numbers |= {number - 1 for number in numbers}  # bounds of a ratio
    changes: list[dict[str, Any]] = [{"loss_agg_mode": mode} for mode in AGGREGATIONS]
    changes += [{key: number} for key in CLIP for number in sorted(numbers)]
    tried = [(change, replace(actor, **change), theirs) for change in changes]
    for change in theirs_alone:
        plain = replace(actor, kl_loss_type=actor.kl_loss_type.removesuffix("+"))
        tried.append((change, plain, foreign.subject_of(name, POLICY, **fields | change)))
    best = max(tried, key=lambda each: _compared(_ours(each[1], each[2]), each[2])[0])
    best_equal, best_words = _compared(_ours(best[1], best[2]), best[2])
    if best_equal <= num_equal:
        return f"{name}: {words}. No change of one key brings them closer"
    ((key, value),) = best[0].items()
    return f"{name}: {words}. With {key}={value} they are {best_words}"


def _ours(actor: ActorConfig, theirs: Subject) -> Subject:
    """Return the run's loss, with the KL where theirs has it, too."""
    scale = actor.loss_scale_factor or LOSS_SCALE_FACTOR
    settings = {"config": actor, "loss_agg_mode": actor.loss_agg_mode, "loss_scale_factor": scale}
    settings |= actor.policy_loss.args
    policy = match(get_policy_loss(actor.policy_loss.loss_mode), "ours", POLICY, settings)
    policy = replace(policy, choose=None)  # it chooses by the arguments
    if not actor.use_kl_loss or not theirs.name.startswith("trl:"):
        return policy

    def with_kl(batch: Batch, facts: Mapping[str, Any]) -> Tensor:
        loss: Tensor = policy.call(batch, facts)[0]
        kl = kl_penalty(batch["log_prob"], batch["ref_log_prob"], actor.kl_loss_type)
        counts = {key: facts[key] for key in GIVEN[-3:]} | {"loss_scale_factor": scale}
        of_kl = agg_loss(kl, batch["response_mask"], actor.loss_agg_mode, **counts)
        return loss + actor.kl_loss_coef * of_kl

    return replace(policy, call=with_kl)


def _compared(ours: Subject, theirs: Subject) -> tuple[int, str]:
    """Return on how many batches two functions are equal, forward and backward; also in words."""

    def compare(subject: Subject, batch: Batch) -> Iterator[tuple[str, Any, Any]]:
        expected = inside(theirs, batch)
        yield "as theirs", expected, inside(subject, batch)

    same, equal, differences = Relation(compare), 0, list[str]()
    refused = ConfigError()
    for batch in all_batches(theirs.kind):
        mask = batch["response_mask"]
        if theirs.equal_cuts:  # in TRL a row has one advantage, and at least one token
            means = batch["advantages"].sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(1)
            batch = {**batch, "advantages": means * mask}
        try:
            theirs.at_once(batch)
        except ConfigError as error:
            refused = error  # it cannot take such a batch
            continue
        if theirs.equal_cuts and not bool(mask.any(1).all()):
            continue
        words = difference(ours, same, batch)
        differences += [f"{words} (mask {mask.tolist()})"] if words else []
        equal += not words
    if not equal and not differences:
        raise refused
    words = f"; different on {len(differences)}: {differences[0]}" if differences else ""
    return equal, f"equal to 1e-6 on {equal} batches{words}"
