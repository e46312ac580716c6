"""The policy's objective in one update: surrogate loss, entropy bonus, KL to the reference.

Example:

    objective = PolicyObjective(settings, data)         # settings: PolicySettings
    update(engine, data, objective.loss, ...)
    metrics |= objective.metrics(engine.groups.batch)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from verl_like.batch.protocol import DataProto
from workers.columns import ROUTED, sampled_log_probs_column
from workers.config import ActorConfig, WorkersConfig, replays_routing
from workers.config.conditions import policy_loss_of
from workers.losses.aggregate import Denominators, LossAndMetrics, agg_loss
from workers.losses.kl import MismatchGauge, kl_penalty
from workers.losses.registry import PolicyLoss, get_policy_loss, traits_of
from workers.training.loss import Loss
from workers.training.microbatch import Columns, MiniBatch
from workers.training.passes.lm_head import TokenOutputs

if TYPE_CHECKING:
    from workers.losses.correction import RolloutCorrection


@dataclass
class PolicySettings:
    """The settings of the objective that are the same in all updates."""

    config: ActorConfig
    policy_loss: PolicyLoss
    bypass_correction: RolloutCorrection | None
    """The correction in bypass mode: the rollout's log-probs are the old log-probs."""
    has_importance_weights: bool
    """True if the driver adds importance weights to batches."""
    temperature: float
    replays_routing: bool

    @classmethod
    def of(cls, config: WorkersConfig, temperature: float) -> PolicySettings:
        """Read the settings, and look up the policy loss."""
        policy, correction = config.actor_rollout_ref, config.algorithm.rollout_correction
        bypass_correction = None
        if correction.bypass_mode:
            from workers.losses.correction import RolloutCorrection

            bypass_correction = RolloutCorrection.of(correction)
        return cls(
            policy.actor,
            get_policy_loss(policy_loss_of(config)),
            bypass_correction,
            correction.has_importance_weights,
            temperature,
            replays_routing(policy),
        )

    @property
    def chooses_tokens(self) -> bool:
        """True if the policy loss treats the tokens in `chosen_tokens` differently."""
        return traits_of(self.policy_loss).choose_tokens is not None


class PolicyObjective:
    """The loss of one update on a batch, and gauges (metrics) that its passes fill."""

    def __init__(self, settings: PolicySettings, data: DataProto) -> None:
        config = settings.config
        self.settings = settings
        self.entropy_coeff = data.meta_info.get("entropy_coeff", config.entropy_coeff)
        self.on_policy = bool(data.meta_info.get("on_policy", False))
        """True if the samples come from the current policy, so that no old log-probs are needed."""
        without_old = self.on_policy or settings.bypass_correction is not None
        measures = without_old and "rollout_log_probs" in data.columns
        width = data.column("responses").shape[1]
        self.mismatch = MismatchGauge(width) if measures else None
        if settings.bypass_correction is not None:
            self.correction_gauge = settings.bypass_correction.gauge()

        names = ["advantages"]
        if settings.replays_routing:
            names.append(ROUTED)
        if config.use_kl_loss:
            names.append("ref_log_prob")
        if self.mismatch is not None:
            names.append("rollout_log_probs")
        if settings.bypass_correction is not None:
            names.append(sampled_log_probs_column(data.columns))
        elif settings.has_importance_weights:
            names.append("rollout_is_weights")
        if not without_old:
            names.append("old_log_probs")
        if settings.chooses_tokens:
            names.append("chosen_tokens")
        self.loss = Loss(
            "policy",
            self.compute,
            list(dict.fromkeys(names)),
            TokenOutputs(settings.temperature, entropy=config.entropy_coeff != 0),
            self.metrics,
        )

    def compute(self, outputs: Columns, columns: Columns, batch: MiniBatch) -> LossAndMetrics:
        """Return the contribution of this micro-batch to the loss and its metrics."""
        config, mask = self.settings.config, columns["response_mask"]
        divisors: Denominators = {
            **batch.denominators,
            "loss_scale_factor": config.loss_scale_factor,
        }

        log_probs = outputs["log_probs"].detach()
        if self.mismatch is not None:
            self.mismatch.add(columns["rollout_log_probs"], log_probs, mask)

        # an on-policy batch has no old log-probs: they equal the current ones
        old_log_probs = columns.get("old_log_probs", log_probs)
        weights = columns.get("rollout_is_weights")
        if self.settings.bypass_correction is not None:
            old_log_probs = columns[sampled_log_probs_column(columns)]
            # rejected tokens still count in the mini-batch's denominators
            weights, mask = self.settings.bypass_correction(
                log_probs, old_log_probs, mask, self.correction_gauge
            )

        chosen: dict[str, Any] = {}
        if self.settings.chooses_tokens:
            chosen["chosen_tokens"] = columns["chosen_tokens"]
        loss, metrics = self.settings.policy_loss(
            old_log_prob=old_log_probs,
            log_prob=outputs["log_probs"],
            advantages=columns["advantages"],
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=weights,
            **config.policy_loss.args,
            **chosen,
            **divisors,
        )

        metrics = {name.removeprefix("actor/"): value for name, value in metrics.items()}
        metrics["pg_loss"] = loss

        if config.entropy_coeff != 0:
            metrics["entropy"] = agg_loss(
                outputs["entropys"], mask, config.loss_agg_mode, **divisors
            )
            loss = loss - self.entropy_coeff * metrics["entropy"]
        if config.target_entropy is not None:  # the driver adjusts `entropy_coeff` by this metric
            metrics["token_entropy"] = agg_loss(outputs["entropys"], mask, "token-mean", **divisors)
        if config.use_kl_loss:
            kl = kl_penalty(outputs["log_probs"], columns["ref_log_prob"], config.kl_loss_type)
            metrics["kl_loss"] = agg_loss(kl, mask, config.loss_agg_mode, **divisors)
            loss = loss + config.kl_loss_coef * metrics["kl_loss"]
        return loss, metrics

    def metrics(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Reduce the gauges over the ranks of `group`, and return their metrics.

        Collective: every rank of `group` must call this.
        """
        metrics: dict[str, float] = {}
        if self.mismatch is not None:
            self.mismatch.all_reduce(group)
            metrics |= self.mismatch.metrics()
        if self.settings.bypass_correction is not None:
            self.correction_gauge.all_reduce(group)
            metrics |= self.correction_gauge.metrics()
        return metrics
