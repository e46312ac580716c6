"""Changes of a replayed step: samples left out (`--without`), and each sample's effect (`--blame`).

Without a sample means: the advantages of the other samples are estimated as if it had not been
sampled, and it is in no mask and no denominator of the update. Its place in its mini-batch stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from trainer.ppo.metrics import compute_data_metrics
from trainer.ppo.scoring import mismatch_metrics
from trainer.run_folder.metrics import reduce_metrics
from verl_like.batch.protocol import DataProto
from verl_like.calls.result import CallResult
from verl_like.errors import BatchError, ConfigError, nearest
from workers.columns import read_column, require, sample_scores, token_counts, write_columns
from workers.rewards.weighted import SKIPPED

if TYPE_CHECKING:
    from trainer.ppo.stages import PPOTrainer

HEADLINES = (
    *("actor/pg_loss", "actor/kl_loss", "actor/ppo_kl", "actor/reward_kl_penalty"),
    *("actor/grad_norm", "critic/vf_loss", "critic/grad_norm"),
)
"""Loss, KL and gradient norms, which a what-if prints first."""
GRAD_NORM, OLD = "actor/grad_norm", "old_log_probs"
WATCHED = ("training/rollout_probs_diff_mean", "critic/score/mean")
"""Metrics of samples whose tokens, log-probs or rewards are wrong."""
ROUNDING = 1e-6
"""Metrics below this size are rounding."""
LOSSES = {"actor": "policy", "critic": "value"}
Estimate = Callable[[DataProto], tuple[DataProto, dict[str, float]]]


def sample_names(batch: DataProto) -> list[str]:
    """Return UID/INDEX of every row, as `uid` and `sample` in rollouts/N.jsonl."""
    require(batch, "uid", "sample_index")
    indices = read_column(batch, "sample_index").tolist()
    pairs = zip(batch.non_tensor_batch["uid"], indices, strict=True)
    return [f"{uid}/{index}" for uid, index in pairs]


def estimate_without(
    estimate: Estimate, batch: DataProto, names: Sequence[str]
) -> tuple[DataProto, dict[str, float]]:
    """Estimate advantages of the other samples; the filter of skipped samples leaves these out."""
    known = sample_names(batch)
    uids = {name.rpartition("/")[0] for name in known}
    for name in names:
        if name not in known and name not in uids:
            raise ConfigError(
                f"--without {name}: the step has no such sample.{nearest(name, [*known, *uids])} "
                "Write UID/SAMPLE, or UID for all samples of a prompt, as in rollouts/N.jsonl."
            )
    left_out = torch.tensor([n in names or n.rpartition("/")[0] in names for n in known])
    if left_out.all():
        raise ConfigError(f"--without leaves none of the {len(known)} samples of the step.")
    skipped = batch.non_tensor_batch.get(SKIPPED, np.zeros(len(batch)))
    batch.non_tensor_batch[SKIPPED] = np.maximum(skipped, left_out.double().numpy())
    rest, metrics = estimate(batch[~left_out])
    absent = batch[left_out]
    zeros = torch.zeros_like(read_column(absent, "response_mask"), dtype=torch.float32)
    new = rest.columns.keys() - absent.columns.keys()
    write_columns(absent, **dict.fromkeys(new, zeros))
    order = torch.cat([(~left_out).nonzero(), left_out.nonzero()]).squeeze(1).argsort()
    return DataProto.concat([rest, absent])[order], metrics


class Effect(NamedTuple):
    """The effect of one sample on a number of the step."""

    name: str
    effect: float
    """The number with the sample minus the number without it."""
    most_of: str
    """A metric that falls to less than half without this sample, or ""."""
    score: float
    num_tokens: int
    text: str


@dataclass
class Blame:
    """The request and the result of `--blame`.

    For `actor/grad_norm` the gradient g of the step, as one mini-batch under the weights before the
    update, is the sum of one gradient per sample. A sample's effect is |g| - |g - its gradient|.
    For a metric of the loss it is the sample's summand. Advantages and denominators of the other
    samples stay. A metric of the batch, such as critic/score/mean, is computed again without the
    sample.
    """

    metric: str = ""
    """Empty: the gradient norm; samples that make most of a metric of `WATCHED` come first."""
    total: float = math.nan
    effects: list[Effect] = field(default_factory=list)
    """The largest first."""

    @property
    def name(self) -> str:
        """The metric by which the samples are ordered."""
        return self.metric or GRAD_NORM

    def measure(self, trainer: PPOTrainer, role: str, batch: DataProto) -> None:
        """Measure the effects of the samples of an update, which the role is about to get."""
        if self.effects or not self.name.startswith(f"{role}/") and role != "actor":
            return
        scored = batch.select()
        if "rollout_log_probs" in batch.columns and OLD not in batch.columns:
            log_probs = trainer.call("actor", "compute_log_prob", batch).batch()
            write_columns(scored, **{OLD: read_column(log_probs, OLD)})
        numbers = batch_numbers(scored)
        watched = [] if self.metric else [name for name in WATCHED if name in numbers]
        without = without_each(scored, {*watched, self.name} & numbers.keys(), numbers)
        most_of = [""] * len(batch)
        for name in watched:
            for row, value in enumerate(without[name]):
                if abs(numbers[name]) > ROUNDING and abs(value) < abs(numbers[name]) / 2:
                    most_of[row] = name
        if self.name in numbers:
            self.total = numbers[self.name]
            effects = [self.total - value for value in without[self.name]]
        else:
            effects = self.loss_effects(trainer.groups[role], role, batch, numbers)
        scores, lengths = sample_scores(batch).tolist(), token_counts(batch)[1].tolist()
        texts = trainer.rollouts.tokenizer.batch_decode(batch.padded("responses"))
        columns = zip(sample_names(batch), effects, most_of, scores, lengths, texts, strict=True)
        self.effects = sorted(map(Effect._make, columns), key=order)

    def loss_effects(
        self, group: Any, role: str, batch: DataProto, numbers: dict[str, float]
    ) -> list[float]:
        """Return the effects of all rows from one pass of all and one of each row."""
        mask = read_column(batch, "response_mask") != 0
        counts = {"num_rows": int(mask.any(1).sum()), "num_tokens": int(mask.sum())}

        def passed(rows: DataProto, keep: bool = False) -> dict[str, float]:
            result = CallResult.of(group.forward_backward(rows, LOSSES[role], counts))
            metrics = {f"{role}/{n}": x for n, x in reduce_metrics(result.metrics).items()}
            gradients: dict[str, float] = group.take_gradients(keep)[0]
            return metrics | gradients

        of_all = passed(batch, keep=True)
        if not self.name.endswith("/grad_norm"):
            if self.name not in of_all:
                known = sorted({GRAD_NORM, *numbers, *of_all.keys()} - {"norm", "dot"})
                raise ConfigError(
                    f"--blame {self.name}: no metric of samples or of the loss."
                    f"{nearest(self.name, known)} Known: {', '.join(known)}."
                )
            self.total = of_all[self.name]
            return [passed(batch[[row]])[self.name] for row in range(len(batch))]
        self.total, effects = of_all["norm"], []
        for row in range(len(batch)):
            part = passed(batch[[row]])
            square = self.total**2 - 2 * part["dot"] + part["norm"] ** 2
            # if the norm of all rows is not finite, the row's own norm orders the rows
            is_known = math.isfinite(self.total) and math.isfinite(square)
            effects.append(self.total - math.sqrt(max(square, 0.0)) if is_known else part["norm"])
        return effects


def order(effect: Effect) -> tuple[bool, bool, float]:
    """Sort numbers that are not finite first, then samples that make most of a metric."""
    return math.isfinite(effect.effect), not effect.most_of, -abs(effect.effect)


def batch_numbers(batch: DataProto) -> dict[str, float]:
    """Return the metrics of a step that its samples determine without a model."""
    numbers = compute_data_metrics(batch, use_critic="values" in batch.columns)
    if {"rollout_log_probs", OLD} <= batch.columns.keys():
        numbers |= mismatch_metrics(batch)
    return numbers


def without_each(
    batch: DataProto, names: Collection[str], numbers: Mapping[str, float]
) -> dict[str, list[float]]:
    """Return metrics of the samples without each of them; `numbers` has those of all samples.

    A mean over samples or tokens follows from each sample's. Another metric is computed again.
    """
    rows, without = torch.arange(len(batch)), {}
    alone = [batch_numbers(batch[[row]]) for row in rows.tolist()] if names else []
    lengths = (read_column(batch, "response_mask") != 0).sum(1).double().numpy()
    for name in names:
        values = np.array([row.get(name, math.nan) for row in alone])
        for weights in (lengths, np.sign(lengths)):
            sums, mean = others(values * weights), (values * weights).sum() / weights.sum()
            if np.isclose(mean, numbers[name], equal_nan=True):
                without[name] = [*sums / np.maximum(others(weights), 1)]
                break
        else:
            without[name] = [batch_numbers(batch[rows != row])[name] for row in rows]
    return without


def others(numbers: np.ndarray) -> np.ndarray:
    """Return the sum of all other numbers, for each of them; not finite numbers do not spread."""
    before = np.concatenate([[0.0], np.cumsum(numbers)[:-1]])
    after = np.concatenate([[0.0], np.cumsum(numbers[::-1])[:-1]])[::-1]
    total: np.ndarray = before + after
    return total


def log_prob_change(batch: DataProto, log_probs: DataProto) -> str:
    """Describe how the log-probs of the next step's samples differ from the saved ones."""
    name = OLD if OLD in batch.columns else "rollout_log_probs"
    inside = read_column(batch, "response_mask") != 0
    was, now = (read_column(columns, n) for columns, n in ((batch, name), (log_probs, OLD)))
    if was.shape != now.shape:
        raise BatchError(f"the log-probs have shapes {was.shape} and {now.shape}.")
    gaps = (now - was)[inside].double()
    return (
        f"log-probs of the next step's samples: {int((gaps != 0).sum())} of {len(gaps)} differ, by "
        f"{gaps.abs().mean():.4g} on average, at most {gaps.abs().max():.4g}"
    )
