"""The actor: the policy in training. A rollout in the same process reads its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.batch.tensordict_import import TensorDict
from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import BatchError
from verl_like.process.worker import Worker
from workers.losses.aggregate import Denominators, agg_loss
from workers.losses.correction import compute_rollout_importance_weights
from workers.losses.kl import kl_penalty
from workers.losses.lm import compute_lm_loss
from workers.losses.mismatch import MismatchGauge
from workers.losses.registry import get_policy_loss
from workers.models.memory import memory_in_use
from workers.models.precision import rollout_dtype
from workers.training.checkpoint import Checkpointed
from workers.training.engine import TrainEngine
from workers.training.mfu import utilization
from workers.training.microbatch import Budget, Columns, MiniBatch
from workers.weights.sync import WeightSender

if TYPE_CHECKING:
    from workers.config import (
        ActorConfig,
        RefConfig,
        RolloutConfig,
        RolloutCorrectionConfig,
        WorkersConfig,
    )

Metrics = dict[str, Any]


def log_prob_temperature(rollout: RolloutConfig) -> float:
    """What divides the logits in every log-prob pass: the rollout's temperature, 1 if greedy."""
    return rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0


def log_prob_budget(section: RolloutConfig | RefConfig, actor: ActorConfig) -> Budget:
    """What a log-prob pass may hold, by the rollout's or the reference's section."""
    rows, tokens = section.log_prob_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu
    return Budget.of(actor.use_dynamic_bsz, rows, tokens)


def drawn_from(columns: Any) -> str:
    """The column of log-probs under the distribution that tokens were drawn from."""
    truncated = "rollout_truncated_log_probs"
    return truncated if truncated in columns.keys() else "rollout_log_probs"


class ActorWorker(Checkpointed, WeightSender, Worker):
    """Scores responses under the current policy and improves it by PPO."""

    engine: TrainEngine
    gauge: MismatchGauge | None = None

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__()
        self.policy = config.actor_rollout_ref
        self.config = self.policy.actor
        self.temperature = log_prob_temperature(self.policy.rollout)
        self.correction: RolloutCorrectionConfig = config.algorithm.rollout_correction
        self.ptx_coef = config.ptx.coef
        self.policy_loss = get_policy_loss(self.config.policy_loss.loss_mode)
        self.budget = Budget.of(
            self.config.use_dynamic_bsz,
            self.config.ppo_micro_batch_size_per_gpu,
            self.config.ppo_max_token_len_per_gpu,
        )
        self.engine = TrainEngine(
            self.policy.model,
            self.config.fsdp_config,
            strategy=self.config.strategy,
            head="token",
            optim_config=self.config.optim,
            grad_clip=self.config.grad_clip,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int) -> None:
        """Load the policy; the schedule spans `total_steps` calls of `update_actor`."""
        self.engine.build(self, total_steps)
        self.sent_dtype = rollout_dtype(self.policy, self.device.type)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, readonly=True)
    def compute_log_prob(self, data: DataProto) -> tuple[DataProto, Metrics]:
        """`old_log_probs` and `entropys` of the responses under the policy as it is now."""
        with utilization("actor_infer", self.engine, data, trains=False) as mfu:
            outputs = self.engine.forward_rows(
                data,
                log_prob_budget(self.policy.rollout, self.config),
                temperature=self.temperature,
                want_entropy=True,
            )
        columns = {"old_log_probs": outputs["log_probs"], "entropys": outputs["entropys"]}
        return DataProto(batch=TensorDict(columns, batch_size=[len(data)])), mfu

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> Metrics:
        """One PPO update over the batch; gives metrics that, but for perf/, every rank agrees on.

        Every optimizer step has its share of the rows `ptx`, and trains their language-model loss
        beside the policy's, `ptx.coef` times.

        With `meta_info["on_policy"]` the samples are of the policy as it is now, and the update's
        own forward pass gives the old log-probs: a batch then needs no `old_log_probs`.
        """
        on_policy = bool(data.meta_info.get("on_policy", False))
        if on_policy:
            self.require_one_step(data)
        measures = on_policy and "rollout_log_probs" in data.batch.keys()
        self.gauge = MismatchGauge(data.batch["responses"].size(1)) if measures else None

        epochs = self.config.ppo_epochs
        with utilization("actor", self.engine, data, passes=epochs) as mfu:
            metrics = self.engine.update(
                data,
                self.columns_of_update(data, on_policy),
                mini_batch_size=self.config.ppo_mini_batch_size * self.policy.rollout.n,
                budget=self.budget,
                epochs=epochs,
                loss_fn=self.loss,
                temperature=self.temperature,
                want_entropy=self.config.entropy_coeff != 0,
                beside=[] if ptx is None else [(ptx, self.ptx_loss)],
            )
        metrics = {f"actor/{name}": value for name, value in metrics.items()}
        if self.gauge is not None:
            self.gauge.all_reduce(self.engine.group, self.engine.device)
            metrics |= self.gauge.metrics()
        return metrics | mfu | memory_in_use(self.engine.device)

    def columns_of_update(self, data: DataProto, on_policy: bool) -> list[str]:
        """What an update reads beside tokens and masks."""
        names = ["advantages"]
        if self.config.use_kl_loss:
            names.append("ref_log_prob")
        if self.gauge is not None:
            names.append("rollout_log_probs")
        if self.correction.rollout_is is not None:
            names.append(drawn_from(data.batch))
        if not on_policy:
            names.append("old_log_probs")
        return list(dict.fromkeys(names))

    def require_one_step(self, data: DataProto) -> None:
        """Refuse a batch said to be on-policy of which the second mini-batch would not be."""
        num_rows = len(data) if data.shard is None else data.shard.total
        mini_batch_size = self.config.ppo_mini_batch_size * self.policy.rollout.n
        if self.config.ppo_epochs != 1 or mini_batch_size != num_rows:
            raise BatchError(
                "update_actor: meta_info['on_policy'] is set, but ppo_epochs="
                f"{self.config.ppo_epochs} and mini-batches of {mini_batch_size} samples make more "
                f"than one optimizer step of {num_rows} samples, and the policy moves with the "
                "first. Leave it out and give old_log_probs (actor.compute_log_prob)."
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self, as_sent: bool = False) -> str:
        """Hash of the full weights; `as_sent`: of the type that a rollout gets them in."""
        return self.engine.weights_checksum(self.sent_dtype if as_sent else None)

    def loss(
        self, outputs: Columns, columns: Columns, batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the policy loss, entropy bonus and KL to the reference."""
        config, mask = self.config, columns["response_mask"]
        divisors: Denominators = {
            **batch.denominators,
            "loss_scale_factor": config.loss_scale_factor,
        }
        # the columns of an on-policy update have none: the policy is the one that drew the samples
        old_log_probs = columns.get("old_log_probs", outputs["log_probs"].detach())
        if self.gauge is not None:
            self.gauge.add(columns["rollout_log_probs"], old_log_probs, mask)
        weights = self.importance_weights(old_log_probs, columns)
        loss, metrics = self.policy_loss(
            old_log_probs,
            outputs["log_probs"],
            columns["advantages"],
            mask,
            config.loss_agg_mode,
            config,
            weights,
            **divisors,
        )
        metrics = {name.removeprefix("actor/"): value for name, value in metrics.items()}
        metrics["pg_loss"] = loss
        if weights is not None:
            metrics["rollout_is_weight"] = agg_loss(weights, mask, "token-mean", **divisors)
        if config.entropy_coeff != 0:
            metrics["entropy"] = agg_loss(
                outputs["entropys"], mask, config.loss_agg_mode, **divisors
            )
            loss = loss - config.entropy_coeff * metrics["entropy"]
        if config.use_kl_loss:
            kl = kl_penalty(outputs["log_probs"], columns["ref_log_prob"], config.kl_loss_type)
            metrics["kl_loss"] = agg_loss(kl, mask, config.loss_agg_mode, **divisors)
            loss = loss + config.kl_loss_coef * metrics["kl_loss"]
        return loss, metrics

    def ptx_loss(
        self, outputs: Columns, columns: Columns, batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the language-model loss of PTX."""
        mask = columns["response_mask"]
        loss = compute_lm_loss(outputs["log_probs"], mask, **batch.denominators)
        return self.ptx_coef * loss, {"ptx_loss": loss}

    def importance_weights(self, old_log_probs: Tensor, columns: Columns) -> Tensor | None:
        """The trainer's over the rollout engine's probability of each token, bounded.

        None without a correction.
        """
        if self.correction.rollout_is is None:
            return None
        return compute_rollout_importance_weights(
            old_log_probs,
            columns[drawn_from(columns)],
            columns["response_mask"],
            rollout_is=self.correction.rollout_is,
            rollout_is_mode=self.correction.rollout_is_mode,
            rollout_is_threshold=self.correction.rollout_is_threshold,
        )
