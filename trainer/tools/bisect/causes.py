"""The cause of a difference: each side's formula, a relation of the numbers, or a setting.

A stage's numbers are computed again from the side's own inputs by the functions that training uses.
Of the variants that give a side's numbers, those are named that do not give the other side's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from trainer.tools.bisect import model, relations
from trainer.tools.bisect.formulas import FORMULAS, Variant
from trainer.tools.bisect.model import Cause
from trainer.tools.bisect.sides import OURS
from trainer.tools.bisect.walk import FIELDS, Finding, Step, on_tokens, pair_of

UNKNOWN = "something else"
MOST_UNKNOWN = 2
"""Differing settings that are named although none is known to act in the stage."""
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
SETTINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "model": ((MODEL, "model_name_or_path"),),
    "prompts": (
        ("data.shuffle", "shuffle_dataset"),
        ("trainer.seed", "seed"),
        ("data", ""),
        (MODEL, "model_name_or_path"),
    ),
    "samples": (
        ("trainer.seed", "seed"),
        (f"{ROLLOUT}.temperature", "temperature"),
        (f"{ROLLOUT}.top_p", "top_p"),
        (f"{ROLLOUT}.top_k", "top_k"),
        (f"{ROLLOUT}.n", "num_generations"),
        ("data.max_response_length", "max_completion_length"),
        (ROLLOUT, ""),
        ("environment", ""),
        (MODEL, ""),
    ),
    "mask": (("algorithm.mask_truncated", "mask_truncated_completions"), ("environment", "")),
    "log-probs": ((f"{ROLLOUT}.temperature", "temperature"), (ROLLOUT, ""), (MODEL, "")),
    "reference": (("actor_rollout_ref.ref", ""), (MODEL, "")),
    "values": (("critic", ""),),
    "scores": (("reward", "reward_weights"), ("algorithm.score_clip", ""), ("data", "")),
    "rewards": (("algorithm", ""), ("reward", "")),
    "advantages": (("algorithm", "scale_rewards"),),
    "loss inputs": (("algorithm.rollout_correction", ""), (ACTOR, "")),
    "loss": (
        (f"{ACTOR}.loss_agg_mode", ""),
        (f"{ACTOR}.kl_loss_coef", "beta"),
        (f"{ACTOR}.clip_ratio", "epsilon"),
        (f"{ACTOR}.entropy_coeff", "entropy_coef"),
        (f"{ACTOR}.ppo_epochs", "num_iterations"),
        (ACTOR, ""),
        ("algorithm", ""),
    ),
    "gradients": (
        (f"{ACTOR}.grad_clip", "max_grad_norm"),
        (ACTOR, "gradient_accumulation_steps"),
        (MODEL, "per_device_train_batch_size"),
    ),
    "learning rate": (
        (f"{ACTOR}.optim.lr", "learning_rate"),
        (f"{ACTOR}.optim.lr_warmup_steps", "warmup_steps"),
        (f"{ACTOR}.optim.lr_scheduler_type", "lr_scheduler_type"),
        (f"{ACTOR}.optim", ""),
    ),
    "optimizer": (
        (f"{ACTOR}.optim.weight_decay", "weight_decay"),
        (f"{ACTOR}.grad_clip", "max_grad_norm"),
        (f"{ACTOR}.optim.eps", "adam_epsilon"),
        (f"{ACTOR}.optim.betas.0", "adam_beta1"),
        (f"{ACTOR}.optim.betas.1", "adam_beta2"),
        (f"{ACTOR}.optim", ""),
        (ACTOR, ""),
        (MODEL, ""),
    ),
}
SETTINGS["order"] = SETTINGS["prompts"]
"""Stage -> prefixes of the keys of verl-like that act in it, with TRL's key of the same meaning."""


def fits(name: str, step: Step) -> set[str]:
    """Return the words of the variants that give a side's numbers."""
    return {variant.words for variant in fitting(name, step)}


def fitting(name: str, step: Step) -> list[Variant]:
    """Return the variants whose numbers equal those that the side recorded."""
    recorded = step.numbers.get(name, step.arrays.get(name))
    if recorded is None or name not in FORMULAS:
        return []
    if isinstance(recorded, np.ndarray) and name != "rewards":
        recorded = on_tokens(recorded, step, step.arrays["response_mask"].shape[1])
        recorded = recorded * (step.arrays["response_mask"] != 0)
    equal = []
    for variant in FORMULAS[name](step):
        values = np.asarray(variant.values, dtype=float)
        if values.shape == np.shape(recorded):
            if np.all(np.abs(values - recorded) <= 3e-6 + 2e-5 * np.abs(recorded)):
                equal.append(variant)
    return equal


def causes_of(finding: Finding, steps: tuple[Step, Step]) -> list[Cause]:
    """Return the causes of the difference, the most certain first; empty if none is known."""
    causes = [*of_formulas(finding, steps)]
    if finding.stage in ("samples", "log-probs", "loss inputs"):
        causes += model.of_log_probs(steps)
    if finding.stage in ("log-probs", "loss inputs"):
        causes += named(relations.of_sources(*steps))
    settings = [*of_settings(finding, steps)]
    if not causes or len(settings) == 1 or any(UNKNOWN in cause["sentence"] for cause in causes):
        causes += settings
    if not causes or finding.stage in ("prompts", "order", "samples", "learning rate"):
        causes += of_relations(finding, steps)
    return list({cause["sentence"]: cause for cause in causes}.values())


def of_formulas(finding: Finding, steps: tuple[Step, Step]) -> Iterator[Cause]:
    """Yield the formulas of both sides, if they differ."""
    variants_of = [fitting(finding.name, step) for step in steps]
    names = [{variant.words for variant in variants} for variants in variants_of]
    if names[0] & names[1] or not any(names):
        return
    sentences, settings = [], []
    for name, variants in zip("AB", variants_of, strict=True):
        if variants:
            sentences.append(f"{name} computes {variants[0].words} ({variants[0].setting})")
            settings.append(variants[0].setting)
        else:
            sentences.append(f"{name} computes {UNKNOWN}")
    yield {
        "probe": f"formula of {finding.name}",
        "sentence": "; ".join(sentences),
        "setting": " | ".join(settings),
    }


def of_settings(finding: Finding, steps: tuple[Step, Step]) -> Iterator[Cause]:
    """Yield the settings that act in this stage and differ."""
    a, b = steps[0].side, steps[1].side
    changed = dict(finding.settings)
    if a.framework != b.framework:
        for ours, theirs in SETTINGS.get(finding.stage, ()):
            values = [s.setting(ours if s.framework == OURS else theirs or ours) for s in (a, b)]
            if None not in values and not same(*values):
                changed[ours] = values
    acting = SETTINGS.get(finding.stage, ())
    keys = [
        key for ours, theirs in acting for key in changed if key.startswith(ours) or key == theirs
    ]
    if not keys and len(changed) <= MOST_UNKNOWN:
        keys = [key for key in changed if not key.startswith("version of ")]
    for key in dict.fromkeys(keys):
        x, y = changed.pop(key)
        yield {
            "probe": "setting",
            "sentence": f"{key} is {x!r} in A and {y!r} in B",
            "setting": key,
        }
    for key in [key for key in changed if key.startswith("version of ")]:
        x, y = changed[key]
        yield {"probe": "version", "sentence": f"{key} is {x} in A, {y} in B", "setting": key}


def same(x: Any, y: Any) -> bool:
    """Return whether two settings are equal; numbers may be text."""
    try:
        return bool(np.isclose(float(x), float(y), rtol=1e-6, atol=0))
    except (TypeError, ValueError):
        return str(x).lower() == str(y).lower()


def of_relations(finding: Finding, steps: tuple[Step, Step]) -> Iterator[Cause]:
    """Yield how the numbers of both sides are related."""
    quantity = next(item for item in FIELDS if item.name == finding.name)
    values = pair_of(quantity, *steps)
    related: list[relations.Relation] = []
    if finding.name in ("prompts", "responses"):
        related += relations.of_steps("prompts", *steps)
        related += relations.of_ids(finding.name, *steps)
    elif finding.name == "lr":
        related += relations.of_schedules(*steps)
    elif values is not None and isinstance(values[0], np.ndarray):
        if values[0].shape == values[1].shape:
            related += relations.of_arrays(*values, *steps)
    elif values is not None:
        related += relations.of_numbers(*values)
    yield from named(related)


def named(related: Iterable[relations.Relation]) -> Iterator[Cause]:
    """Yield relations as causes."""
    for name, sentence in related:
        yield {"probe": name, "sentence": sentence, "setting": ""}
