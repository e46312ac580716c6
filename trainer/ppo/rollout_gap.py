"""Explain a gap between the log-probs of the rollout and of the trainer.

Call `diagnose_rollout_gap` by hand on a trainer whose models are built. It generates twice,
compares the log-probs, and changes no weights. `trainer.ppo.scoring` computes the gap metrics of
every step that computes old log-probs.
"""

from __future__ import annotations

from typing import Any

from trainer.config.devices import run_devices
from trainer.rollouts.samples import repeat_prompts
from verl_like.batch.protocol import DataProto
from workers.columns import read_columns
from workers.models.precision import name_of, precision_of, rollout_dtype

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.3}
"""Largest log-prob gap that rounding explains, by the dtype of the computation."""


def largest_gap(batch: DataProto) -> float:
    """Return the largest difference between rollout and trainer log-probs over all tokens."""
    columns = read_columns(batch, "rollout_log_probs", "old_log_probs", "response_mask")
    gaps = (columns["rollout_log_probs"] - columns["old_log_probs"]).abs()
    return float(gaps.masked_fill(columns["response_mask"] == 0, 0.0).max())


def explain_gap(
    *, gap: float, plain_gap: float, stale: bool, quantization: str | None, dtype: str
) -> tuple[str, str]:
    """Return the first cause that explains the measurements, as (name, sentence).

    The causes, in this order: staleness, none, sampling semantics, quantization, dtype, unknown.

    Args:
        gap: largest log-prob gap with the run's sampling settings.
        plain_gap: the same gap without top-k, top-p, min-p, bias and minimum length.
        stale: True if the rollout's weights differ from the actor's.
        quantization: the engine's configured quantization.
        dtype: the narrower of the compute dtypes of rollout and actor.
    """
    rounding = TOLERANCES["float32"]
    is_cut = gap > 10 * max(plain_gap, rounding)
    is_narrow = dtype != "float32" and gap <= TOLERANCES.get(dtype, rounding)
    causes = (
        (
            "staleness",
            stale,
            "the rollout and the actor have different weights: sync before generating",
        ),
        ("none", gap <= rounding, "rounding of float32"),
        (
            "sampling semantics",
            is_cut,
            f"it is {plain_gap:.3g} without truncation, so the engine does not report "
            "log-probs of the whole distribution at this temperature",
        ),
        ("quantization", quantization, f"quantization={quantization} rounds"),
        ("dtype", is_narrow, f"rounding of {dtype}; float32 would close it"),
        (
            "unknown",
            True,
            f"with equal weights, in {dtype}, with and without truncation: the two "
            "forward passes differ (attention, positions, or an engine's own model code)",
        ),
    )
    cause, story = next((cause, story) for cause, holds, story in causes if holds)
    return cause, f"the largest log-prob gap is {gap:.3g}: {story}."


def diagnose_rollout_gap(trainer: Any, prompts: DataProto) -> tuple[str, str]:
    """Return the name of the cause of the gap between rollout and actor, and a sentence about it.

    The prompts are sampled once as configured and once without truncation; the actor computes the
    log-probs of both batches. No weights change.

    Example:

        cause, sentence = diagnose_rollout_gap(trainer, next(iter(trainer.loader)))

    Args:
        trainer: a `PPOTrainer` whose models are built.
        prompts: a batch of its `loader`.
    """
    policy = trainer.config.actor_rollout_ref
    gaps = []
    plain = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0, "logit_bias": {}}
    for settings in ({}, plain):
        batch = trainer.rollouts.generate(repeat_prompts(prompts, 1), **settings)
        log_probs, _ = trainer.groups["actor"].compute_log_prob(batch)
        batch = batch.union(log_probs)
        gaps.append(largest_gap(batch))
    actor = set(trainer.groups["actor"].weights_checksum(as_sent=True))
    rollout = set(trainer.groups["rollout"].weights_checksum())
    device = run_devices(trainer.config.trainer).type
    types = (precision_of(policy.model, device).compute, rollout_dtype(policy, device))
    return explain_gap(
        gap=gaps[0],
        plain_gap=gaps[1],
        stale=actor != rollout,
        quantization=policy.rollout.quantization
        or policy.rollout.engine_kwargs.get("quantization"),
        dtype=name_of(min(types, key=lambda dtype: dtype.itemsize)),
    )
