"""The actor: the policy in training. A rollout in the same process takes the engine's weights.

`PolicyObjective` is the objective of one update: surrogate loss, entropy bonus, KL to the
reference.

    objective = PolicyObjective(settings, data)         # settings: PolicySettings
    update(engine, data, objective.loss, ...)
    metrics |= objective.metrics(engine.groups.batch)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, register
from verl_like.calls.result import CallResult
from verl_like.errors import BatchError
from workers.columns import ROUTED, SEQUENCE_COLUMNS, batch_columns, sampled_log_probs_column
from workers.config import (
    ActorConfig,
    FSDPConfig,
    RolloutConfig,
    WorkersConfig,
    replays_routing,
    shuffle_seed,
)
from workers.config.conditions import policy_loss_of
from workers.losses.aggregate import Denominators, LossAndMetrics, agg_loss
from workers.losses.kl import MismatchGauge, kl_penalty
from workers.losses.registry import PolicyLoss, get_policy_loss, traits_of
from workers.models.precision import rollout_dtype
from workers.roles.model_worker import TRAIN_DISPATCH, LossFactory, ModelWorker
from workers.rollout.build_engine import takes_adapter
from workers.training.checkpoints.calls import CheckpointMixin
from workers.training.engine import TrainEngine
from workers.training.loss import Loss, lm_loss
from workers.training.mfu import memory_in_use, utilization
from workers.training.microbatch import Columns, MiniBatch, pass_budget
from workers.training.passes.lm_head import TokenOutputs
from workers.training.role_model_spec import RoleModelSpec
from workers.training.update import update_model
from workers.weights.transfer import WeightSender

if TYPE_CHECKING:
    from workers.losses.correction import RolloutCorrection


def log_prob_temperature(rollout: RolloutConfig) -> float:
    """Return the divisor of logits in log-prob passes: the rollout's temperature, 1 if greedy."""
    return rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0


class ActorWorker(CheckpointMixin, WeightSender, ModelWorker):
    """Computes log-probs under the current policy, and trains the policy with PPO.

    Example:

        class CountingActor(ActorWorker):       # role_workers.actor=my_module.CountingActor
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def num_parameters(self) -> int:
                return sum(weight.numel() for weight in self.engine.parameters())
    """

    engine: TrainEngine

    def __init__(self, config: WorkersConfig) -> None:
        """Build the model and its training engine."""
        super().__init__()
        self.policy = config.actor_rollout_ref
        self.config: ActorConfig = self.policy.actor
        self.temperature = log_prob_temperature(self.policy.rollout)
        self.objective_settings = PolicySettings.from_config(config, self.temperature)
        self.ptx_loss = lm_loss(config.ptx.coef, "ptx_loss", is_balanced=False)
        self.budget = pass_budget(config, self.config.ppo_micro_batch_size_per_gpu)
        rows = self.policy.rollout.log_prob_micro_batch_size_per_gpu
        self.log_prob_budget = pass_budget(config, rows)
        self.routed = [ROUTED] if replays_routing(self.policy) else []
        self.engine = TrainEngine(
            self.role_model(config), optim_config=self.config.optim, grad_clip=self.config.grad_clip
        )
        self.split_calls_by(self.engine)

    @classmethod
    def role_model(cls, config: WorkersConfig, role: str = "actor") -> RoleModelSpec:
        """Describe the policy's model, which is trained."""
        policy, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
        return RoleModelSpec(
            "actor_rollout_ref.model.path",
            policy.model,
            FSDPConfig(**actor.fsdp_config),
            actor.strategy,
            trains=True,
            quantization=policy.model.quantization,
            has_average=actor.ema_decay is not None,
            saved=actor.checkpoint.save_contents,
            section="actor_rollout_ref.actor",
            rows=policy.rollout.log_prob_micro_batch_size_per_gpu,
            trained_rows=actor.ppo_micro_batch_size_per_gpu,
            mini_batch=actor.ppo_mini_batch_size * policy.rollout.n,
            epochs=actor.ppo_epochs,
            parallel=config.axes(actor.parallel),
            replays_routing=replays_routing(policy),
            router_aux_loss_coef=actor.router_aux_loss_coef,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int = 0) -> None:
        """Load the policy; the LR schedule spans `total_steps` calls of `update_actor`."""
        self.engine.build(self, total_steps)
        self.sent_dtype = rollout_dtype(self.policy, self.device.type)
        self.sends_adapter = takes_adapter(self.policy)
        self.sends_changed = self.policy.rollout.weight_sync == "changed" and not self.sends_adapter
        if self.config.ema_decay is not None:
            from workers.training.moving_average import WeightAverage

            self.average = WeightAverage(self.engine.module, self.config.ema_decay)

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    @batch_columns(reads=(*SEQUENCE_COLUMNS, ROUTED), scores=True)
    def compute_log_prob(self, data: DataProto) -> CallResult:
        """Return `old_log_probs` and `entropys` of the responses under the current policy.

        If `meta_info["sum_pi_squared"]` is true, also return the column `sum_pi_squared`, which
        some advantage estimators need.
        """
        wants_squares = bool(data.meta_info.get("sum_pi_squared", False))
        with utilization("actor_infer", self.engine, trains=False) as mfu:
            token_outputs = TokenOutputs(
                self.temperature, entropy=True, sum_pi_squared=wants_squares
            )
            budget = self.log_prob_budget or self.budget
            outputs = self.engine.forward_rows(data, budget, token_outputs, self.routed)
        columns = {"old_log_probs": outputs.pop("log_probs"), **outputs}
        return CallResult(DataProto.from_dict(columns), mfu)

    @register(dispatch_mode=TRAIN_DISPATCH, blocking=False, readonly=True)
    @batch_columns(
        reads=(
            *(*SEQUENCE_COLUMNS, "sample_number", "old_log_probs", "ref_log_prob", "advantages"),
            *("rollout_log_probs", "rollout_truncated_log_probs", "rollout_is_weights"),
            *("chosen_tokens", ROUTED),
        )
    )
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> dict[str, Any]:
        """Run one PPO update on the batch and return metrics.

        Except for perf/, the metrics are equal on all ranks. The rows `ptx` are divided over the
        optimizer steps; each step adds their language-model loss, times `ptx.coef`.

        The batch needs no `old_log_probs` in two cases. With `meta_info["on_policy"]`, the samples
        come from the current policy, and the forward pass of the update computes the
        log-probs. Under `bypass_mode`, the rollout's log-probs replace them.

        `meta_info["entropy_coeff"]` overrides `actor.entropy_coeff`, unless that is 0.
        """
        objective = self.objective(data)
        if objective.on_policy:
            self.require_one_step(data)
        with utilization("actor", self.engine) as mfu:
            metrics = update_model(
                self.engine,
                data,
                objective.loss,
                budget=self.budget,
                shuffle_seed=shuffle_seed(self.config),
                extra_batches=[] if ptx is None else [(ptx, self.ptx_loss)],
            )
        if self.average is not None:
            self.average.update()
        metrics = {f"actor/{name}": value for name, value in metrics.items()}
        metrics |= objective.metrics(self.engine.groups.batch)
        return metrics | mfu | memory_in_use(self.engine.device)

    def objective(self, data: DataProto) -> PolicyObjective:
        """Return the objective of one update on this batch."""
        return PolicyObjective(self.objective_settings, data)

    def losses(self) -> dict[str, LossFactory]:
        """Return `policy`, the loss of `update_actor`, and the LM losses `ptx` and `lm`."""
        return {
            "policy": lambda data: self.objective(data).loss,
            "ptx": lambda _: self.ptx_loss,
            "lm": lambda _: lm_loss(),
        }

    def require_one_step(self, data: DataProto) -> None:
        """Reject an on-policy batch of several optimizer steps; the second would be off-policy."""
        num_rows = len(data) if data.shard is None else data.shard.total
        spec = self.engine.spec
        if spec.epochs != 1 or (spec.mini_batch or num_rows) < num_rows:
            raise BatchError(
                "update_actor: meta_info['on_policy'] is set, but "
                f"ppo_epochs={spec.epochs} and mini-batches of {spec.mini_batch} "
                f"samples make more than one optimizer step for {num_rows} samples, so the policy "
                "changes after the first step. Do not set meta_info['on_policy']; provide "
                "old_log_probs (actor.compute_log_prob)."
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_average(self, on: bool) -> None:
        """With `on`, swap in the moving average of the weights; otherwise, swap it out.

        Do not train while it is swapped in.
        """
        assert self.average is not None, "the driver asks for an average only under actor.ema_decay"
        if on:
            self.average.swap_in()
        else:
            self.average.swap_out()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def norms(self) -> dict[str, dict[str, float]]:
        """Return norms of weights, moments and the last step's gradients, by the weights' names.

        `weight_projections` show the direction of each weight.

        Gradients are those before clipping. Their norms are computed from the first call on.
        """
        from workers.training.norms import moment_norms, norms_by_name, projection

        gradients, self.engine.gradient_norms = self.engine.gradient_norms or {}, {}
        norms = {"grad_norms": gradients}
        if self.engine.optimizer is not None:
            norms |= moment_norms(self.engine.optimizer, self.engine.module)
        tensors = self.engine.named_full_tensors()  # of large models, not all at once
        norms |= {"weight_norms": {}, "weight_projections": {}}
        for name, tensor in tensors:
            norms["weight_norms"] |= norms_by_name([(name, tensor)])
            norms["weight_projections"][name] = projection(tensor)
        return norms

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self, as_sent: bool = False) -> str:
        """Return a hash of the full weights; with `as_sent`, of the weights that rollouts get."""
        if as_sent and self.sends_adapter:
            from workers.weights.full_weights import checksum_of

            return checksum_of(self.engine.full_trained_tensors())
        return self.engine.weights_checksum(self.sent_dtype if as_sent else None)


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
    def from_config(cls, config: WorkersConfig, temperature: float) -> PolicySettings:
        """Read the settings, and look up the policy loss."""
        policy, correction = config.actor_rollout_ref, config.algorithm.rollout_correction
        bypass_correction = None
        if correction.bypass_mode:
            from workers.losses.correction import RolloutCorrection

            bypass_correction = RolloutCorrection.from_config(correction)
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
