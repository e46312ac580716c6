"""The table of probes: settings that act in a formula, and the values that are tried.

A side's numbers are computed again from its other fields by the functions that training uses,
first with the run's settings, then with one, two and three of them changed, until they are equal.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.ppo.advantages.estimators import (
    Groups,
    is_last_inside,
    on_tokens,
    sequence_scores,
    whiten_,
)
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.tools.bisect.sides import ACTOR, Step
from verl_like.tensor_ops import masked_mean
from workers.config import ActorConfig
from workers.losses.aggregate import AGGREGATIONS, agg_loss
from workers.losses.kl import KL_ESTIMATORS
from workers.losses.registry import get_policy_loss, log_ratio

ROLLOUT, STD = "actor_rollout_ref.rollout", "norm_adv_by_std_in_grpo"
CLIP_RATIO, NONE = f"{ACTOR}.clip_ratio", "none"
MAX_CHANGES, MAX_TRIES, MAX_ROWS = 3, 20_000, 64
Settings = dict[str, Any]
Numbers = Sequence[Any] | None
"""Numbers, and perhaps what is added to them, times a coefficient; None if not computable."""
Formula = Callable[[str, Step, Settings, set[str]], Numbers]
"""(field, step, settings, the changed ones) -> numbers; a field that is not recorded raises."""


class Probe(NamedTuple):
    """A setting of a formula."""

    argument: str
    keys: str
    """The key of verl-like, and other names that are read if it is null; empty if no key has it."""
    values: Sequence[Any] | Callable[[Step], Iterable[Any]]
    """The values that are tried; the first is the default."""
    words: str = ""
    """Describes a value that no key has."""
    alone: Sequence[Any] = ()
    """More values, which are tried while no other setting is changed."""

    def choices(self, step: Step) -> list[Any]:
        return [*(self.values(step) if callable(self.values) else self.values)]

    def tried(self, step: Step) -> list[Any]:
        """Return the run's setting, if it is one that could be tried, and the other values."""
        values, chosen = self.choices(step), step.side.setting(*self.keys.split())
        is_number = isinstance(values[0], float) and isinstance(chosen, int | float)
        return list(dict.fromkeys([chosen, *values] if is_number or chosen in values else values))

    def describe(self, value: Any) -> str:
        if self.words or value in SCORE_ESTIMATORS:
            return (self.words or "advantages: {}").format(value)
        return f"{self.keys.split()[0]}={str(value).lower() if isinstance(value, bool) else value}"


# ------------------------------------------------------------------------------------ formulas


def score_estimator(formula: Callable[[Tensor, Groups, Tensor], Tensor]) -> Callable[..., Any]:
    """Return an estimator from a formula of scores, groups, and 1 for rows that are complete."""

    def estimate(token_level_rewards: Any, response_mask: Any, index: Any, complete: Any) -> Any:
        scores = sequence_scores(token_level_rewards)
        values = formula(scores, Groups.of(index, scores), complete)
        return on_tokens(values, response_mask), None

    return estimate


def biased(scores: Tensor, groups: Groups, complete: Tensor) -> Tensor:
    """Return GRPO's advantages with the deviation over n instead of n - 1."""
    centered, size = groups.centered(scores), groups.size_of_row()
    return centered / (groups.std(centered) * ((size - 1) / size).sqrt() + 1e-6)


SCORE_ESTIMATORS = {
    "the score": score_estimator(lambda scores, groups, complete: scores),
    "the deviation over n, not n - 1": score_estimator(biased),
    "mean and deviation of the batch": score_estimator(
        lambda scores, groups, complete: (scores - scores.mean()) / (scores.std() + 1e-8)
    ),
    "a mean without truncated rows": score_estimator(
        lambda scores, groups, complete: groups.centered(scores, complete)
    ),
}
"""Estimators that verl-like does not have."""


def normalized_over_rows(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the mean advantage of each row, minus their mean, over their deviation."""
    rows = masked_mean(advantages, mask, -1)
    return on_tokens((rows - rows.mean()) / (rows.std() + 1e-4), mask)


THEN: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "left": lambda x, mask, limit: x,
    "normalized over rows": lambda x, mask, limit: normalized_over_rows(x, mask),
    "whitened over tokens": lambda x, mask, limit: whiten_(x.clone(), mask.float()),
    "clipped": lambda x, mask, limit: x.clamp(-limit, limit),
}


def advantages(name: str, step: Step, settings: Settings, changed: set[str]) -> Numbers:
    """Estimate advantages by `estimator` from the rewards or scores of groups."""
    estimator, mask = settings["estimator"], step.mask
    function = SCORE_ESTIMATORS.get(estimator) or ADVANTAGE_ESTIMATORS.look_up(estimator)
    parameters = {*inspect.signature(function).parameters}
    if not changed <= {"estimator", "groups", "inputs", "then", *parameters}:
        return None
    truncated = torch.from_numpy(step.arrays.get("truncated", np.zeros(len(mask))) != 0)
    bootstraps = step.side.setting("algorithm.bootstrap_truncated")
    columns = settings | {n: step.tensor(n) for n in parameters & step.arrays.keys()}
    columns |= {
        "token_level_rewards": on_last(step.tensor(settings["inputs"], "scores"), mask),
        "response_mask": mask.float(),
        "index": groupings(step)[settings["groups"]],
        "truncated": truncated if bootstraps else None,
        "complete": (~truncated).float(),
    }
    values, _ = function(**{n: x for n, x in columns.items() if n in parameters})
    return [THEN[settings["then"]](values, mask, float(abs(step.arrays[name]).max()))]


def on_last(x: Tensor, mask: Tensor) -> Tensor:
    """Return numbers of tokens; those of rows are put at the last token."""
    return x if x.ndim == 2 else x[:, None] * is_last_inside(mask)


def rewards(name: str, step: Step, settings: Settings, changed: set[str]) -> Numbers:
    """Return the scores, minus a coefficient times an estimate of the KL."""
    mask = step.mask
    numbers = [on_last(step.tensor("token_level_scores", "scores"), mask)]
    if settings["kl"] != NONE:
        kl = kl_of(settings["kl"], step, "old_log_probs", "rollout_log_probs") * mask
        numbers.append(
            -kl if settings["per"] == "token" else -on_last(masked_mean(kl, mask, -1), mask)
        )
    return [x.sum(1) for x in numbers] if step.arrays[name].ndim == 1 else numbers


def kl_of(kind: str, step: Step, *policy: str) -> Tensor:
    """Return the KL of tokens between the first of these log-probs and the reference."""
    return KL_ESTIMATORS[kind](step.tensor(*policy) - step.tensor("ref_log_prob"))


CLIPPING = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def loss(name: str, step: Step, settings: Settings, changed: set[str]) -> Numbers:
    """Return the policy loss of one update; under the name `loss`, with the KL in the loss."""
    kind, mode = settings["kl"], settings["mode"]
    if step.num_updates > 1 or (kind != NONE and name != "loss"):
        return None
    mask, (old, current) = step.mask, log_probs_of_loss(step)
    columns = {"old_log_prob": old, "log_prob": current, "response_mask": mask}
    columns["advantages"] = step.tensor("advantages") * mask
    if "rollout_is_weights" in step.arrays and settings["weights"] == "with":
        columns["rollout_is_weights"] = step.tensor("rollout_is_weights")
    kl = (
        None
        if kind == NONE
        else kl_of(kind, step, "log_probs", "old_log_probs", "rollout_log_probs")
    )
    config, function = ActorConfig(), get_policy_loss(settings["loss"])
    for key in CLIPPING:
        setattr(config, key, settings[key])
    factor, of_parts = {"loss_scale_factor": settings["factor"]}, []
    for rows in torch.arange(len(mask)).split(settings["rows"]):
        part = {column: values[rows] for column, values in columns.items()}
        numbers = [function(**part, loss_agg_mode=mode, config=config, **factor)[0]]
        if kl is not None:
            numbers.append(agg_loss(kl[rows], mask[rows], mode, **factor))
        of_parts.append(torch.stack(numbers))
    return [*torch.stack(of_parts).mean(0)]


def log_probs_of_loss(step: Step) -> list[Tensor]:
    """Return old and current log-probs; they are equal where one of them is not recorded."""
    names = ("old_log_probs", "log_probs")
    if {*names} <= step.arrays.keys():
        return [step.tensor(name) for name in names]
    return [
        step.tensor(*names[::-1], "rollout_log_probs", default=torch.zeros(step.mask.shape))
    ] * 2


def moments(name: str, step: Step, settings: Settings, changed: set[str]) -> Numbers:
    """Return the norms of Adam's moments after one update without earlier ones."""
    begins = "with the run" if step.number == 1 else "at this step"
    if step.num_updates > 1 or settings["begin"] != begins:
        return None
    gradients = step.arrays["grad_norms"]
    of_weights = dict(zip(step.names["grad_norms"], gradients, strict=True))
    norms = np.array([of_weights[weight] for weight in step.names[name]])
    norms *= min(1.0, settings["clip"] / (np.linalg.norm(gradients) + 1e-6))
    if name == "exp_avg_norms":
        return [norms * (1 - settings["beta1"])]
    return [norms * math.sqrt(1 - settings["beta2"])]


SOURCES = {
    "the sampler's (rollout_correction.bypass_mode=true)": "rollout_log_probs",
    "those before the update": "old_log_probs",
}
"""Words -> the field from which log-probs may be taken."""


def log_probs(name: str, step: Step, settings: Settings, changed: set[str]) -> Numbers:
    """Return the log-probs of the tokens under the first model, or those of another field."""
    recorded = step.arrays[name]
    source = SOURCES.get(settings["source"])
    if source:
        return None if name == source else [step.arrays[source]]
    if (step.number == 1) != (settings["weights"] == "current") or recorded.ndim == 1:
        return None
    temperatures = PROBES["log-probs"][0].tried(step)
    of_temperatures = log_probs_of_model(step, settings["dtype"], tuple(temperatures))
    if of_temperatures is None:
        return None
    computed = recorded.copy()
    rows = of_temperatures[temperatures.index(settings["temperature"])]
    for row, values in enumerate(rows):
        computed[row, : len(values)] = values
    return [computed]


@lru_cache(maxsize=4)
def log_probs_of_model(
    step: Step, dtype: str, temperatures: tuple[float, ...]
) -> list[list[np.ndarray]] | None:
    """Return the log-probs of rows at each temperature, or None if the model is not here."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            step.side.model_path, local_files_only=True, dtype=getattr(torch, dtype)
        )
    except (OSError, ValueError):
        return None
    results: list[list[np.ndarray]] = [[] for _ in temperatures]
    pairs = zip(step.ids("prompts"), step.ids("responses"), strict=True)
    for prompt, response in [*pairs][:MAX_ROWS]:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        if not int(ids.max()) < model.config.vocab_size:
            return None
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float()
        for temperature, rows in zip(temperatures, results, strict=True):
            of_tokens = (logits / temperature).log_softmax(-1)
            rows.append(of_tokens.gather(1, ids[len(prompt) :, None])[:, 0].numpy())
    return results


# ----------------------------------------------------------------------------------- the table


def groupings(step: Step) -> dict[str, Any]:
    """Return the groups as recorded, and groups of each size of neighbors and of every k-th row."""
    rows, numbers = len(step.lengths), dict[bytes, int]()
    of_prompts = [numbers.setdefault(bytes(ids), len(numbers)) for ids in step.ids("prompts")]
    groups = {"as recorded": step.arrays.get("group", np.array(of_prompts or [0] * rows))}
    for size in micro_batches(step):
        groups[f"of {size} neighboring rows"] = np.arange(rows) // size
        groups[f"of every {rows // size}th row"] = np.arange(rows) % (rows // size)
    return groups


def micro_batches(step: Step) -> list[int]:
    """Return the number of rows, and its divisors."""
    rows = len(step.lengths)
    return [rows, *(size for size in range(1, rows) if rows % size == 0)]


def factors(step: Step) -> list[int]:
    """Return the longest response that the run allows, and the width of the record."""
    width = step.arrays.get("response_mask", np.zeros((1, 1))).shape[1]
    return [step.side.setting("data.max_response_length", "max_completion_length") or width, width]


def off_policy(*values: Any) -> Callable[[Step], Sequence[Any]]:
    """Return the values to try: only the first where the ratio is 1."""

    def choose(step: Step) -> Sequence[Any]:
        if "response_mask" not in step.arrays:
            return values[:1]
        old, current = log_probs_of_loss(step)
        is_off = bool(log_ratio(current, old, step.mask).abs().max() > 1e-4)
        return values if is_off else values[:1]

    return choose


HUNDREDTHS = [number / 100 for number in range(1, 101)]
DISCOUNTS = (1.0, 0.99, 0.95, 0.9, 0.999, 0.995, 0.98, 0.97, 0.5, 0.0)
CLIPS = off_policy(0.2, 0.1, 0.3, 0.28, 0.25, 0.4, 0.5, math.inf)
TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 1.1, 1.2, 1.5, 2.0)
LOSSES = off_policy("vanilla", "reinforce", "gspo", "geo_mean", "cispo", "sapo")
ESTIMATORS = (
    *("grpo", "rloo", "grpo_batch_std", "reinforce_plus_plus_baseline", "reinforce_plus_plus"),
    *("opo", "gpg", "grpo_passk", "gae", "coati", "remax", *SCORE_ESTIMATORS),
)
KLS = (NONE, "low_var_kl", "k3_unclamped", "kl", "mse", "abs")
PROBES: dict[str, tuple[Probe, ...]] = {
    "log-probs": (
        Probe("temperature", f"{ROLLOUT}.temperature temperature", TEMPERATURES),
        Probe("dtype", "", ("float32", "bfloat16"), "log-probs in {}"),
        Probe("source", "", ("the model's", *SOURCES), "log-probs that are {}"),
        Probe("weights", "", ("current", "stale"), "{} weights, those of the beginning"),
    ),
    "rewards": (
        Probe("kl", "algorithm.kl_penalty", KLS),
        Probe("per", "algorithm.kl_penalty_per", ("token", "sequence")),
    ),
    "advantages": (
        Probe(STD, f"algorithm.{STD}", (True, False)),
        Probe("epsilon", "algorithm.adv_epsilon", (1e-6, 1e-4, 1e-8, 1e-5, 1e-3, 0.0)),
        Probe("gamma", "algorithm.gamma gamma", DISCOUNTS, "", HUNDREDTHS),
        Probe("lam", "algorithm.lam lam", DISCOUNTS, "", HUNDREDTHS),
        Probe("whiten", "", (True, False), "whiten={}"),
        Probe("groups", "", groupings, "groups {}"),
        Probe("inputs", "", ("rewards", "scores"), "advantages of the {}"),
        Probe("estimator", "algorithm.adv_estimator", ESTIMATORS),
        Probe("then", "", tuple(THEN), "advantages that are {} afterwards"),
    ),
    "loss": (
        Probe("mode", f"{ACTOR}.loss_agg_mode", tuple(AGGREGATIONS)),
        Probe("factor", f"{ACTOR}.loss_scale_factor", factors),
        Probe("rows", "", micro_batches, "the mean of each micro-batch of {} rows"),
        Probe("loss", f"{ACTOR}.policy_loss.loss_mode", LOSSES),
        Probe("clip_ratio_low", f"{CLIP_RATIO}_low {CLIP_RATIO} epsilon", CLIPS, "", HUNDREDTHS),
        Probe(
            "clip_ratio_high",
            f"{CLIP_RATIO}_high {CLIP_RATIO} epsilon_high epsilon",
            *(CLIPS, "", HUNDREDTHS),
        ),
        Probe(
            *("clip_ratio_c", f"{CLIP_RATIO}_c", off_policy(3.0, math.inf, 2.0, 10.0), ""),
            [number / 10 for number in range(11, 100)],
        ),
        Probe("weights", "", ("with", "without"), "the loss {} weights of the rollout"),
        Probe("kl", f"{ACTOR}.kl_loss_type", KLS),
    ),
    "optimizer": (
        Probe("beta1", f"{ACTOR}.optim.betas.0 adam_beta1", (0.9, 0.95, 0.8, 0.5, 0.0)),
        Probe("beta2", f"{ACTOR}.optim.betas.1 adam_beta2", (0.999, 0.99, 0.98, 0.95, 0.9)),
        Probe("clip", f"{ACTOR}.grad_clip max_grad_norm", (1.0, math.inf, 0.5, 0.1)),
        Probe("begin", "", ("with the run", "at this step"), "Adam's moments, which begin {}"),
    ),
}
"""Formula -> the settings that are its arguments."""
FORMULAS: dict[str, tuple[Formula, str]] = {
    "rewards": (rewards, "rewards"),
    "advantages": (advantages, "advantages"),
    **dict.fromkeys(("pg_loss", "loss"), (loss, "loss")),
    **dict.fromkeys(("exp_avg_norms", "exp_avg_sq_norms"), (moments, "optimizer")),
    **dict.fromkeys(("rollout_log_probs", "old_log_probs", "log_probs"), (log_probs, "log-probs")),
}
"""Field -> its formula, and the name of its settings in `PROBES`."""
COEFFICIENTS = {"rewards": "algorithm.kl_ctrl.kl_coef", "loss": f"{ACTOR}.kl_loss_coef"}
"""Field -> the key of the coefficient of the KL in it."""


# ---------------------------------------------------------------------------------- the search


def fitting_settings(name: str, step: Step) -> list[Settings]:
    """Return the settings with which a field's formula gives the numbers that a side recorded.

    Of these, the ones with the fewest changes of the run's settings are returned.
    """
    probes = {probe.argument: probe for probe in PROBES[FORMULAS[name][1]]}
    tried = {argument: probe.tried(step) for argument, probe in probes.items()}
    start, num_tries = {argument: values[0] for argument, values in tried.items()}, 0
    for count in range(MAX_CHANGES + 1):
        fits: list[Settings] = []
        for chosen in combinations(tried, count):
            values = [[*tried[x][1:], *(probes[x].alone if count == 1 else ())] for x in chosen]
            for changes in product(*values):
                settings = start | dict(zip(chosen, changes, strict=True))
                fit = fitted(name, step, settings, {*chosen})
                if fit is not None:
                    fits.append(fit)
                num_tries += 1
                if num_tries > MAX_TRIES:
                    return []
        if fits:
            return fits
    return []


def fitted(name: str, step: Step, settings: Settings, changed: set[str]) -> Settings | None:
    """Return the settings, with the coefficient of a KL that fits; None if the numbers differ.

    A coefficient that is in the settings is not fitted.
    """
    formula, stage = FORMULAS[name]
    try:
        numbers = formula(name, step, settings, changed)
    except (LookupError, TypeError):  # a field is not recorded
        return None
    if numbers is None:
        return None
    base, *added = (np.asarray(x, dtype=float) for x in numbers)
    recorded = step.arrays[name].reshape(base.shape)
    if base.ndim == 2:
        mask = step.arrays.get("response_mask", np.ones(base.shape)) != 0
        base, recorded = base * mask, recorded * mask
    for unit in added:
        exact = float(((recorded - base) * unit).sum() / max((unit**2).sum(), 1e-20))
        coefficient = float(f"{exact:.{2 if recorded.ndim == 0 else 4}g}")
        if "coefficient" in settings:
            coefficient = settings["coefficient"]
        elif coefficient <= 0 or abs(exact - coefficient) > 2e-3 * coefficient:
            return None
        base, settings = base + coefficient * unit, settings | {"coefficient": coefficient}
    absolute, relative = (1e-3, 0.0) if stage == "log-probs" else (3e-6, 2e-5)
    gap = np.abs(base - recorded)
    return settings if np.all(gap <= absolute + relative * np.abs(recorded)) else None


def formulas_of(name: str, steps: Sequence[Step]) -> list[list[Settings]]:
    """Return the settings that give each side's numbers; none if some give both sides' numbers."""
    fits = [fitting_settings(name, step) for step in steps] if name in FORMULAS else [[], []]
    for step, of_other in zip(steps, reversed(fits), strict=True):
        if any(fitted(name, step, settings, set()) is not None for settings in of_other):
            return [[], []]
    return fits
