"""The actor: the policy in training. A rollout in the same process takes the engine's weights."""

from __future__ import annotations

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, register
from verl_like.calls.result import CallMetrics, CallResult
from verl_like.errors import BatchError
from workers.columns import ROUTED, SEQUENCE_COLUMNS, batch_columns
from workers.config import FSDPConfig, RolloutConfig, WorkersConfig, replays_routing, shuffle_seed
from workers.models.precision import rollout_dtype
from workers.roles.model_worker import TRAIN_DISPATCH, LossFactory, ModelWorker
from workers.roles.policy_objective import PolicyObjective, PolicySettings
from workers.rollout.build_engine import takes_adapter
from workers.training.checkpoints.calls import CheckpointMixin
from workers.training.engine import TrainEngine
from workers.training.loss import lm_loss
from workers.training.mfu import memory_in_use, utilization
from workers.training.microbatch import pass_budget
from workers.training.optim import moment_norms, norms_by_name
from workers.training.passes.lm_head import TokenOutputs
from workers.training.role_model_spec import RoleModelSpec
from workers.training.update import update_model
from workers.weights.transfer import WeightSender


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
        self.config = self.policy.actor
        self.temperature = log_prob_temperature(self.policy.rollout)
        self.objective_settings = PolicySettings.of(config, self.temperature)
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
            wanted = TokenOutputs(self.temperature, entropy=True, sum_pi_squared=wants_squares)
            budget = self.log_prob_budget or self.budget
            outputs = self.engine.forward_rows(data, budget, wanted, self.routed)
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
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> CallMetrics:
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

        Gradients are those before clipping. Their norms are computed from the first call on.
        """
        gradients, self.engine.gradient_norms = self.engine.gradient_norms or {}, {}
        norms = {"grad_norms": gradients}
        if self.engine.optimizer is not None:
            norms |= moment_norms(self.engine.optimizer, self.engine.module)
        tensors = self.engine.named_full_tensors()  # of large models, not all at once
        norms["weight_norms"] = {n: norms_by_name([(n, x)])[n] for n, x in tensors}
        return norms

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self, as_sent: bool = False) -> str:
        """Return a hash of the full weights; with `as_sent`, of the weights that rollouts get."""
        if as_sent and self.sends_adapter:
            from workers.weights.checksum import checksum_of

            return checksum_of(self.engine.full_trained_tensors())
        return self.engine.weights_checksum(self.sent_dtype if as_sent else None)
