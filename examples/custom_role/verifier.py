"""A custom role: a verifier that learns to distinguish good responses from bad ones.

    PYTHONPATH=examples/custom_role verl-like ppo trainer.cls=verifier.TrainerWithVerifier \
        +role_workers.verifier=verifier.VerifierWorker +role_mapping.verifier=global_pool ...

It is trained next to the policy. In each step, it judges the samples before it is trained on them,
and `verifier/accuracy` is the fraction that it judged correctly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from verl_like import DataProto, Dispatch, Worker, register
from verl_like.extend import (
    SEQUENCE_COLUMNS,
    Column,
    CriticWorker,
    Loss,
    MicroBatchBudget,
    PPOTrainer,
    RoleModelSpec,
    ScoreTrainEngine,
    batch_columns,
    read_columns,
    reduce_metrics,
    update_model,
)

GOOD = 0.5
"""Minimum score of a good response."""


class VerifierWorker(Worker):
    """A scalar head on the critic's model.

    Its output at a row's last token is the log-odds of a good score.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        critic, optim = CriticWorker.role_model(config), config.actor_rollout_ref.actor.optim
        spec = RoleModelSpec("critic.model.path", critic.model, critic.fsdp, head="scalar")
        self.engine = ScoreTrainEngine(spec, optim_config=replace(optim, **config.critic.optim))
        self.budget = MicroBatchBudget(rows=config.critic.ppo_micro_batch_size_per_gpu)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load and shard the model."""
        self.engine.build(self)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @batch_columns(
        SEQUENCE_COLUMNS, writes=[Column("verdicts", "[rows]", "float32", role="verifier")]
    )
    def compute_verdicts(self, data: DataProto) -> DataProto:
        """Return `verdicts` [rows], the probabilities that the whole responses are good."""
        return DataProto.from_dict(
            {"verdicts": self.engine.score_rows(data, self.budget).sigmoid()}
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_verifier(self, data: DataProto) -> dict[str, float]:
        """Take one optimizer step on the whole batch."""
        loss = Loss("verifier", self.loss, columns=("token_level_scores",))
        metrics = update_model(self.engine, data, loss, budget=self.budget)
        return {f"verifier/{name}": value for name, value in metrics.items()}

    def loss(self, outputs: Any, columns: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's contribution to the loss.

        Contributions are added up, so the divisor is the number of rows in the whole mini-batch.
        """
        inside = columns["response_mask"].any(dim=1)
        is_good = columns["token_level_scores"].sum(dim=1) >= GOOD
        total = binary_cross_entropy_with_logits(
            outputs["scores"][inside], is_good[inside].float(), reduction="sum"
        )
        share = total / max(batch.num_rows, 1)
        return share, {"loss": share}


class TrainerWithVerifier(PPOTrainer):
    """PPO that asks the verifier about new samples, and then trains it on them."""

    def score(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Run PPO's stage; meanwhile the verifier judges the samples."""
        verdicts = self.call("verifier", "compute_verdicts", batch)
        batch, metrics = super().score(batch)
        scores = read_columns(batch, "token_level_scores")["token_level_scores"].sum(dim=1)
        is_right = (verdicts.get().batch["verdicts"] >= 0.5) == (scores >= GOOD)
        return batch, metrics | {"verifier/accuracy": is_right.double().mean().item()}

    def update(self, batch: DataProto) -> dict[str, float]:
        """Start the verifier's update first: in its own pool, it overlaps the other updates."""
        verifier = self.call("verifier", "update_verifier", batch)
        return super().update(batch) | reduce_metrics(verifier.get())
