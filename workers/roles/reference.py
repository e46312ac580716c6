"""The reference: the actor's initial policy, frozen.

Beside an actor that trains LoRA adapters it loads nothing: the actor's module with its adapters off
is the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_like.batch.protocol import DataProto
from verl_like.batch.tensordict_import import TensorDict
from verl_like.calls.dispatch import Dispatch, register
from verl_like.process.worker import Worker
from workers.models.lora import adapter_off
from workers.roles.actor import log_prob_budget, log_prob_temperature
from workers.training.engine import TrainEngine

if TYPE_CHECKING:
    from workers.config import WorkersConfig


class ReferenceWorker(Worker):
    """Scores responses under the weights that training started from: those of the actor's path."""

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__()
        policy = config.actor_rollout_ref
        self.config = policy.ref
        self.temperature = log_prob_temperature(policy.rollout)
        self.budget = log_prob_budget(self.config, policy.actor)
        self.engine = TrainEngine(
            policy.model, self.config.fsdp_config, strategy=policy.actor.strategy
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy without an optimizer.

        Beside an actor with adapters: after the actor's `init_model`.
        """
        actor: Any = self.sibling("actor")
        if actor is not None and actor.policy.model.lora_rank > 0:
            self.engine = actor.engine
        else:
            self.engine.build(self)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, readonly=True)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` of the responses."""
        with adapter_off(self.engine.module):
            outputs = self.engine.forward_rows(data, self.budget, temperature=self.temperature)
        return DataProto(
            batch=TensorDict({"ref_log_prob": outputs["log_probs"]}, batch_size=[len(data)])
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Hash of the full weights."""
        with adapter_off(self.engine.module):
            return self.engine.weights_checksum()
