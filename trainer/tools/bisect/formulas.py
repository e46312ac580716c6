"""Variants of the formulas of a step, computed by the functions that training uses.

Each function yields (words, the setting of verl-like, numbers) for one field, from the arrays that
a side recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, on_tokens, scores_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import is_last_inside, whiten_
from trainer.tools.bisect.walk import ACTOR, Step, num_updates
from verl_like.tensor_ops import masked_mean
from workers.config import ActorConfig
from workers.losses.aggregate import AGGREGATIONS, agg_loss
from workers.losses.importance_ratio import log_ratio
from workers.losses.kl import KL_ESTIMATORS
from workers.losses.registry import get_policy_loss


class Variant(NamedTuple):
    """A way to compute a field."""

    words: str
    setting: str
    values: Any


ESTIMATORS = (
    *("grpo", "rloo", "grpo_batch_std", "reinforce_plus_plus_baseline", "reinforce_plus_plus"),
    *("opo", "gpg", "grpo_passk", "gae", "coati", "remax"),
)
EPSILONS = (1e-6, 1e-4, 1e-8, 1e-5, 1e-3, 0.0)
DISCOUNTS = (1.0, 0.99, 0.95, 0.9, 0.999, 0.995, 0.98, 0.97, 0.5, 0.0)
CLIPS = (0.2, 0.1, 0.3, 0.28, 0.25, 0.4, 0.5)
ALGORITHM = "algorithm"
OWN_ESTIMATOR = "algorithm.adv_estimator=your.module.function"


def tensor(step: Step, name: str) -> Tensor | None:
    array = step.arrays.get(name)
    return None if array is None else torch.from_numpy(np.array(array, dtype=np.float32))


def mask_of(step: Step) -> Tensor | None:
    mask = tensor(step, "response_mask")
    return None if mask is None else mask.bool()


def token_rewards(step: Step, mask: Tensor) -> dict[str, Tensor]:
    """Return the token rewards that an estimator may have read, by their words."""
    distinct: dict[str, Tensor] = {}
    for name, words in (("rewards", ""), ("scores", " of the scores, without the KL")):
        values = tensor(step, name)
        if values is not None:
            values = values if values.ndim == 2 else values[:, None] * is_last_inside(mask)
            if not any(torch.equal(values, other) for other in distinct.values()):
                distinct[words if distinct else ""] = values
    return distinct


def groupings(step: Step) -> dict[str, np.ndarray]:
    """Return the groups as recorded, and groups of each size of neighbors and of every k-th row."""
    rows, groups = len(step.arrays["response_mask"]), dict[str, np.ndarray]()
    group = step.arrays.get("group")
    if group is None and (prompts := step.ids("prompts")) is not None:
        numbers: dict[bytes, int] = {}
        group = np.array([numbers.setdefault(bytes(ids), len(numbers)) for ids in prompts])
    if group is not None:
        groups[""] = group
    for size in range(2, rows + 1):
        if rows % size == 0:
            groups[f", in groups of {size} neighboring rows"] = np.arange(rows) // size
            groups[f", in groups of every {rows // size}th row"] = np.arange(rows) % (rows // size)
    return groups


def advantage_variants(step: Step) -> Iterator[Variant]:
    """Yield estimators with their epsilon, deviation, groups, discount and whitening."""
    mask = mask_of(step)
    if mask is None:
        return
    for of_scores, rewards in token_rewards(step, mask).items():
        for of_groups, index in groupings(step).items():
            for words, setting, values in estimates(step, mask, rewards, index, not of_groups):
                yield Variant(words + of_groups + of_scores, setting, values)


def estimates(
    step: Step, mask: Tensor, rewards: Tensor, index: np.ndarray, thorough: bool
) -> Iterator[tuple[str, str, Tensor]]:
    columns = {"token_level_rewards": rewards, "response_mask": mask.float(), "index": index}
    columns["values"] = tensor(step, "values")
    scores = scores_of(rewards)
    groups = Groups.of(index, scores)
    centered = groups.centered(scores)
    yield "no baseline: the score itself", f"{ALGORITHM}.adv_estimator=…", on_tokens(scores, mask)
    for name in ESTIMATORS if thorough else ESTIMATORS[:2]:
        estimator = ADVANTAGE_ESTIMATORS.look_up(name)
        parameters = inspect.signature(estimator).parameters
        arguments = {key: columns[key] for key in parameters if columns.get(key) is not None}
        choices: list[dict[str, Any]] = [{}]
        if "epsilon" in parameters:
            choices = [{"epsilon": epsilon} for epsilon in EPSILONS]
        if "norm_adv_by_std_in_grpo" in parameters:
            choices += [{"norm_adv_by_std_in_grpo": False}]
        if "gamma" in parameters:
            gammas = dict.fromkeys((step.side.setting("algorithm.gamma", "gamma"), *DISCOUNTS))
            choices = [{"gamma": gamma} for gamma in gammas if gamma is not None]
        if "lam" in parameters:
            lams = dict.fromkeys((step.side.setting("algorithm.lam", "lam"), *DISCOUNTS))
            choices = [c | {"lam": lam} for c in choices for lam in lams if lam is not None]
        if "whiten" in parameters:
            choices += [c | {"whiten": False} for c in choices]
        for chosen in choices:
            try:
                values, _ = estimator(**arguments, **chosen)
            except TypeError:  # an input is not recorded
                break
            arguments_text = ", ".join(f"{key}={value}" for key, value in chosen.items())
            words = f"{name}({arguments_text})" if chosen else name
            yield words, f"{ALGORITHM}.adv_estimator={name}" + as_keys(chosen), values
    if not thorough:
        return
    size, std = groups.size_of_row(), groups.std(centered)
    for epsilon in EPSILONS[:3]:
        biased = centered / (std * ((size - 1) / size).sqrt() + epsilon)
        words = f"grpo with the deviation over n instead of n - 1 (epsilon={epsilon})"
        yield words, OWN_ESTIMATOR, on_tokens(biased, mask)
    overall = (scores - scores.mean()) / (scores.std() + 1e-8)
    words = "mean and deviation of the whole batch, without groups"
    yield words, OWN_ESTIMATOR, on_tokens(overall, mask)
    of_rows = {"grpo": groups.normalized(centered, 1e-6), "rloo": centered * size / (size - 1)}
    of_rows |= {"the centered score": centered}
    for name, values in of_rows.items():
        on_rows = (values - values.mean()) / (values.std() + 1e-4)
        yield f"{name}, then normalized over rows", OWN_ESTIMATOR, on_tokens(on_rows, mask)
        tokens = whiten_(on_tokens(values, mask).clone(), mask.float())
        yield f"{name}, then whitened over tokens", OWN_ESTIMATOR, tokens
    if (recorded := tensor(step, "advantages")) is not None:
        limit = float(recorded.abs().max())
        for name, values in of_rows.items():
            clipped = on_tokens(values.clamp(-limit, limit), mask)
            yield f"{name}, clipped to ±{limit:.4g}", "a subclass of the trainer", clipped
    if (truncated := step.arrays.get("truncated")) is not None and truncated.any():
        kept = torch.from_numpy(~truncated.astype(bool))
        only = Groups.of(index, scores).centered(scores, weights=kept.float())
        words = "a mean without the truncated rows"
        yield words, "a subclass of the trainer", on_tokens(only, mask)


def as_keys(chosen: dict[str, Any]) -> str:
    """Return arguments of an estimator as keys of `algorithm`."""
    keys = []
    for name, value in chosen.items():
        if name == "epsilon":
            if value != EPSILONS[0]:
                keys.append(f"(an estimator of your own with epsilon={value})")
        elif name == "whiten":
            keys.append(f"{ALGORITHM}.running_norm=[advantages] (no whitening)")
        else:
            keys.append(f"{ALGORITHM}.{name}={str(value).lower()}")
    return "".join(f" {key}" for key in keys)


def reward_variants(step: Step) -> Iterator[Variant]:
    """Yield the scores, minus each estimate of the KL with the coefficient that fits best."""
    mask, scores, rewards = mask_of(step), tensor(step, "scores"), tensor(step, "rewards")
    if mask is None or scores is None or rewards is None:
        return
    last = is_last_inside(mask)
    tokens = tensor(step, "token_level_scores")
    base = scores[:, None] * last if tokens is None else tokens
    per_row = rewards.ndim == 1

    def shape(values: Tensor) -> np.ndarray:
        return (values.sum(1) if per_row else values).numpy()

    yield Variant("the score", f"{ALGORITHM}.use_kl_in_reward=false", shape(base))
    policy = tensor(step, "old_log_probs")
    policy = tensor(step, "rollout_log_probs") if policy is None else policy
    reference = tensor(step, "ref_log_prob")
    if policy is None or reference is None:
        return
    for name in ("kl", "low_var_kl", "mse", "abs", "k3_swapped"):
        kl = KL_ESTIMATORS[name](policy - reference).masked_fill(~mask, 0)
        for per, values in (("token", kl), ("sequence", masked_mean(kl, mask, -1)[:, None] * last)):
            total = torch.from_numpy(shape(values))
            gap = torch.from_numpy(shape(base)) - rewards
            coefficient = rounded(float((gap * total).sum() / total.square().sum().clamp(1e-20)))
            keys = f"{ALGORITHM}.use_kl_in_reward=true {ALGORITHM}.kl_penalty={name}"
            keys += f" {ALGORITHM}.kl_penalty_per={per} {ALGORITHM}.kl_ctrl.kl_coef={coefficient}"
            words = f"the score minus {coefficient} x KL ({name}, per {per})"
            yield Variant(words, keys, shape(base - coefficient * values))


def rounded(number: float) -> float:
    """Return the number with four digits, as settings have."""
    return float(f"{number:.4g}")


def loss_variants(step: Step) -> Iterator[Variant]:
    """Yield policy losses by clipping, aggregation and denominators."""
    mask, advantages = mask_of(step), tensor(step, "advantages")
    if mask is None or advantages is None or num_updates(step) > 1:
        return
    if advantages.ndim == 1:
        advantages = on_tokens(advantages, mask)
    current, old = tensor(step, "log_probs"), tensor(step, "old_log_probs")
    ratio = torch.zeros_like(advantages) if current is None or old is None else current - old
    weights = tensor(step, "rollout_is_weights")
    for of_clip, keys, losses in token_losses(step, ratio, advantages, mask):
        for of_weights, weight in (("", weights), (", without the rollout's weights", None)):
            if of_weights and weights is None:
                continue
            weighed = losses if weight is None else losses * weight
            for words, setting, loss in aggregated(step, weighed, mask):
                yield Variant(words + of_clip + of_weights, f"{setting}{keys}", float(loss))


def token_losses(
    step: Step, ratio: Tensor, advantages: Tensor, mask: Tensor
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the token losses for each clipping; only one if the ratio is 1."""
    zeros = torch.zeros_like(ratio)
    ratio = log_ratio(ratio, zeros, mask)
    if not ratio.abs().max() > 1e-4:
        yield "", "", -advantages
        return
    side = step.side
    known = [side.setting(f"{ACTOR}.clip_ratio_{end}", name) for end, name in CLIP_KEYS]
    known.append(side.setting(f"{ACTOR}.clip_ratio", "epsilon"))
    ranges = [float(value) for value in dict.fromkeys((*known, *CLIPS)) if value is not None]
    for low in ranges:
        for high in ranges:
            for dual in (3.0, float("inf"), 2.0, 10.0):
                losses = loss_of_tokens(ratio, advantages, low, high, dual)
                words = f", clipped to [{1 - low:.4g}, {1 + high:.4g}], dual clip {dual:g}"
                keys = f" {ACTOR}.clip_ratio_low={low} {ACTOR}.clip_ratio_high={high}"
                yield words, f"{keys} {ACTOR}.clip_ratio_c={dual}", losses
    yield ", without clipping", f" {ACTOR}.clip_ratio=1e9", -advantages * ratio.exp()
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    of_rows = (ratio * mask).sum(1, keepdim=True) / lengths
    low, high = ranges[0], ranges[min(1, len(ranges) - 1)]
    losses = loss_of_tokens(of_rows, advantages, low, high, float("inf"))
    yield ", one ratio per sequence (GSPO)", f" {ACTOR}.policy_loss.loss_mode=gspo", losses


CLIP_KEYS = (("low", "epsilon"), ("high", "epsilon_high"))


def loss_of_tokens(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float
) -> Tensor:
    """Return the loss of each token by the policy loss `vanilla`."""
    loss_fn, config = get_policy_loss("vanilla"), ActorConfig()
    config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c = low, high, dual
    ones = torch.ones_like(advantages)
    token_losses_of = loss_fn.takes_arguments_of[0]  # type: ignore[attr-defined]
    arguments = torch.zeros_like(advantages), ratio.expand_as(advantages), advantages, ones.bool()
    losses: Tensor = token_losses_of(*arguments, config)[0]
    return losses


def aggregated(step: Step, losses: Tensor, mask: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the mean losses for every aggregation, then for every cut into micro-batches."""
    longest = step.side.setting("data.max_response_length", "max_completion_length")
    rows, width = mask.shape
    modes: list[tuple[str, str, str, Any]] = []
    for mode in AGGREGATIONS:
        key = f"{ACTOR}.loss_agg_mode={mode}"
        if not mode.endswith("norm"):
            modes.append((mode, key, mode, None))
            continue
        for factor in dict.fromkeys((longest or width, width)):
            words = f"{mode} by {factor} tokens"
            modes.append((words, f"{key} {ACTOR}.loss_scale_factor={factor}", mode, factor))
    for words, key, mode, factor in modes:
        yield words, key, agg_loss(losses, mask, mode, loss_scale_factor=factor)
    for words, key, mode, factor in modes:
        for size in [size for size in range(1, rows) if rows % size == 0]:
            parts = zip(losses.split(size), mask.split(size), strict=True)
            means = [agg_loss(x, m, mode, loss_scale_factor=factor) for x, m in parts]
            cut = f"{words} of each micro-batch of {size} rows, then their mean"
            divisor = f"{key} (verl-like divides by the counts of the mini-batch)"
            yield cut, divisor, torch.stack(means).mean()
    total = (losses * mask).sum()
    yield "sum over tokens / (rows x width)", "a policy loss of your own", total / mask.numel()
    yield (
        "mean over rows, empty rows included",
        "a policy loss of your own",
        (masked_mean(losses, mask, -1).sum() / rows),
    )


def whole_loss_variants(step: Step) -> Iterator[Variant]:
    """Yield the policy losses plus each estimate of the KL, with the coefficient that fits."""
    recorded = step.numbers.get("loss")
    mask, reference = mask_of(step), tensor(step, "ref_log_prob")
    policy = next((p for n in LOG_PROBS if (p := tensor(step, n)) is not None), None)
    for words, setting, loss in loss_variants(step):
        yield Variant(words, f"{setting} {ACTOR}.use_kl_loss=false", loss)
    if recorded is None or mask is None or reference is None or policy is None:
        return
    for words, setting, loss in list(loss_variants(step))[:MOST_WITH_KL]:
        mode = setting.partition(" ")[0].partition("=")[2]
        if mode not in AGGREGATIONS or "micro" in words:
            continue
        for name in ("low_var_kl", "kl", "mse", "abs"):
            kl = KL_ESTIMATORS[name](policy - reference)
            factor = step.side.setting("data.max_response_length", "max_completion_length")
            mean = float(agg_loss(kl, mask, mode, loss_scale_factor=factor))
            coefficient = (recorded - loss) / mean if abs(mean) > 1e-9 else 0.0
            short = float(f"{coefficient:.2g}")
            if short <= 0 or abs(short - coefficient) > 2e-3 * short:
                continue
            with_kl = f"{words}, plus {short} x KL ({name})"
            keys = f" {ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef={short}"
            yield Variant(
                with_kl, f"{setting}{keys} {ACTOR}.kl_loss_type={name}", loss + short * mean
            )


LOG_PROBS = ("log_probs", "old_log_probs", "rollout_log_probs")
MOST_WITH_KL = 400

FORMULAS: dict[str, Callable[[Step], Iterator[Variant]]] = {
    "rewards": reward_variants,
    "advantages": advantage_variants,
    "pg_loss": loss_variants,
    "loss": whole_loss_variants,
}
