"""Log-probs of the rollout against those of the trainer: metrics of a batch, and a self-test.

`self_test` says where a gap comes from. It is called by hand on a trainer whose models are built,
generates twice and compares; it changes no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainer.ppo.config import PPOConfig
from verl_like.batch.protocol import DataProto
from workers.columns import has_column, read_columns
from workers.losses.mismatch import MismatchGauge
from workers.models.precision import name_of, precision_of, rollout_dtype

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.3}
"""Largest log-prob gap that is rounding, by the type that the weights are computed in."""


def mismatch_metrics(batch: DataProto) -> dict[str, float]:
    """verl's figures on `rollout_log_probs` against `old_log_probs`."""
    columns = read_columns(batch, "rollout_log_probs", "old_log_probs", "response_mask")
    gauge = MismatchGauge(columns["response_mask"].shape[1])
    gauge.add(columns["rollout_log_probs"], columns["old_log_probs"], columns["response_mask"])
    return gauge.metrics()


def largest_gap(batch: DataProto) -> float:
    """The largest difference of two log-probs of one token."""
    columns = read_columns(batch, "rollout_log_probs", "old_log_probs", "response_mask")
    gaps = (columns["rollout_log_probs"] - columns["old_log_probs"]).abs()
    return float(gaps.masked_fill(columns["response_mask"] == 0, 0.0).max())


@dataclass(frozen=True)
class GapFacts:
    """What `self_test` finds out."""

    gap: float
    """Largest log-prob gap of the run's own sampling."""
    plain_gap: float
    """The same without top-k, top-p, min-p, bias and minimum length."""
    stale: bool
    """Whether the rollout's weights are not the actor's."""
    quantization: str | None
    """What the engine was asked to quantise to."""
    dtype: str
    """The type that either side computes in, the narrower one."""


def explain_gap(facts: GapFacts) -> tuple[str, str]:
    """The cause in a word, and a sentence about it.

    The causes: none, staleness, sampling semantics, quantisation, dtype, unknown.
    """
    rounding = TOLERANCES["float32"]
    if facts.stale:
        return (
            "staleness",
            f"the rollout's weights are not the actor's (gap {facts.gap:.3g}): sync before "
            "generating.",
        )

    if facts.gap <= rounding:
        return "none", f"the largest log-prob gap is {facts.gap:.3g}: rounding of float32."
    if facts.gap > 10 * max(facts.plain_gap, rounding):
        return "sampling semantics", (
            f"the gap is {facts.gap:.3g} with the run's sampling and {facts.plain_gap:.3g} "
            "without truncation: the engine reports log-probs of another distribution than the "
            "whole one at the temperature."
        )

    if facts.quantization:
        return (
            "quantisation",
            f"the gap is {facts.gap:.3g} under quantization={facts.quantization}, which rounds.",
        )
    if facts.dtype != "float32" and facts.gap <= TOLERANCES.get(facts.dtype, rounding):
        return (
            "dtype",
            f"the gap is {facts.gap:.3g}: rounding of {facts.dtype}; float32 would close it.",
        )

    return "unknown", (
        f"the gap is {facts.gap:.3g} with equal weights, in {facts.dtype}, with and without "
        "truncation: the two forward passes differ (attention, positions, or an engine's own "
        "model code)."
    )


def self_test(trainer: Any, prompts: DataProto) -> tuple[str, str]:
    """What separates rollout and actor: cause and sentence, as `explain_gap` has them.

    Samples are made from these prompts as the run makes them, and plainly; the actor scores both.
    """
    policy = trainer.config.actor_rollout_ref
    gaps = []
    plain = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0, "logit_bias": {}}
    for settings in ({}, plain):
        index = DataProto.from_dict({"sample_index": torch.zeros(len(prompts), dtype=torch.int64)})
        batch = trainer.roll_out(prompts.select().union(index), **settings)
        log_probs, _ = trainer.groups["actor"].compute_log_prob(batch)
        batch = batch.union(log_probs)
        gaps.append(largest_gap(batch))
    actor = set(trainer.groups["actor"].weights_checksum(as_sent=True))
    rollout = set(trainer.groups["rollout"].weights_checksum())
    is_on_gpus = trainer.config.trainer.device != "cpu" and torch.cuda.is_available()
    device = "cuda" if is_on_gpus else "cpu"
    types = (precision_of(policy.model, device).compute, rollout_dtype(policy, device))
    return explain_gap(
        GapFacts(
            gap=gaps[0],
            plain_gap=gaps[1],
            stale=actor != rollout,
            quantization=policy.rollout.quantization
            or policy.rollout.engine_kwargs.get("quantization"),
            dtype=name_of(min(types, key=lambda dtype: dtype.itemsize)),
        )
    )


def measures_reference(config: PPOConfig, step: int) -> bool:
    """Whether this step tells how far an int8 reference is off: before the actor has moved."""
    return (
        step == 1
        and "ref" in config.role_mapping
        and bool(config.actor_rollout_ref.ref.quantization)
    )


def reference_drift(batch: DataProto, config: PPOConfig, step: int) -> dict[str, float]:
    """At the first step, the mean |log-prob by the reference - by the actor| of a token.

    Both have the same weights then, and the actor's are not rounded.
    """
    if not measures_reference(config, step) or not has_column(batch, "old_log_probs"):
        return {}
    columns = read_columns(batch, "ref_log_prob", "old_log_probs", "response_mask")
    gaps = (columns["ref_log_prob"] - columns["old_log_probs"]).abs().double()
    inside = columns["response_mask"] != 0
    return {"ref/quantization_log_prob_diff_mean": float(gaps[inside].mean())}
