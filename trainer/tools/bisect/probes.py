"""The table of probes: settings that act in a stage, and the values that are tried.

A stage's numbers are computed again from the side's own inputs by the functions that training uses,
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

from trainer.ppo.advantages.groups import Groups, on_tokens, scores_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import is_last_inside, whiten_
from trainer.tools.bisect.sides import ACTOR, Step
from verl_like.tensor_ops import masked_mean
from workers.config import ActorConfig
from workers.losses.aggregate import AGGREGATIONS, agg_loss
from workers.losses.kl import KL_ESTIMATORS
from workers.losses.registry import get_policy_loss, log_ratio

ROLLOUT, STD = "actor_rollout_ref.rollout", "norm_adv_by_std_in_grpo"
Settings = dict[str, Any]
Tries = Sequence[Any] | Callable[[Step], Iterable[Any]]


class Probe(NamedTuple):
    """A setting of a formula."""

    argument: str
    keys: str
    """The key of verl-like, and other names that are read if it is null; empty if no key has it."""
    values: Sequence[Any] | Callable[[Step], Iterable[Any]]
    """The values that are tried; the first is the default."""
    words: str = ""
    """Describes a value that no key has."""

    def choices(self, step: Step) -> list[Any]:
        return [*(self.values(step) if callable(self.values) else self.values)]

    def tried(self, step: Step) -> list[Any]:
        """Return the run's own value, if it is one that could be tried, and the others."""
        values = self.choices(step)
        own = step.side.setting(*self.keys.split())
        is_number = isinstance(values[0], float) and isinstance(own, int | float)
        return list(dict.fromkeys([own, *values] if is_number or own in values else values))

    def describe(self, value: Any) -> str:
        if self.words or value in OWN:
            return self.words.format(value) if self.words else f"{value} (a function of your own)"
        key = self.keys.split()[0]
        return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def groupings(step: Step) -> dict[str, Any]:
    """Return the groups as recorded, and groups of each size of neighbors and of every k-th row."""
    rows, numbers = len(step.arrays["response_mask"]), dict[bytes, int]()
    of_prompts = [numbers.setdefault(bytes(ids), len(numbers)) for ids in step.ids("prompts")]
    groups = {"as recorded": step.arrays.get("group", np.array(of_prompts or [0] * rows))}
    for size in [size for size in range(2, rows + 1) if rows % size == 0]:
        groups[f"of {size} neighboring rows"] = np.arange(rows) // size
        groups[f"of every {rows // size}th row"] = np.arange(rows) % (rows // size)
    return groups


def micro_batches(step: Step) -> list[int]:
    """Return the number of rows, and its divisors."""
    rows = len(step.arrays["response_mask"])
    return [rows, *(size for size in range(1, rows) if rows % size == 0)]


def factors(step: Step) -> list[int]:
    """Return the longest response that the run allows, and the width of the record."""
    width = step.arrays["response_mask"].shape[1]
    return [step.side.setting("data.max_response_length", "max_completion_length") or width, width]


Numbers = Sequence[Any] | None
"""Numbers, and perhaps what is added to them, times a coefficient; None if not computable."""


def biased(scores: Tensor, groups: Groups, kept: Tensor) -> Tensor:
    """Return GRPO's advantages with the deviation over n instead of n - 1."""
    centered, size = groups.centered(scores), groups.size_of_row()
    return centered / (groups.std(centered) * ((size - 1) / size).sqrt() + 1e-6)


OTHER_ESTIMATORS: dict[str, Callable[[Tensor, Groups, Tensor], Tensor]] = {
    "the score": lambda scores, groups, kept: scores,
    "the deviation over n, not n - 1": biased,
    "mean and deviation of the batch": lambda scores, groups, kept: (
        (scores - scores.mean()) / (scores.std() + 1e-8)
    ),
    "a mean without truncated rows": lambda scores, groups, kept: groups.centered(scores, kept),
}
"""Formulas of scores that no estimator has; `kept` is 0 in truncated rows."""
THEN: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "normalized over rows": lambda x, mask, limit: on_tokens(
        ((rows := masked_mean(x, mask, -1)) - rows.mean()) / (rows.std() + 1e-4), mask
    ),
    "whitened over tokens": lambda x, mask, limit: whiten_(x.clone(), mask.float()),
    "clipped": lambda x, mask, limit: x.clamp(-limit, limit),
}


def advantages(name: str, step: Step, settings: Settings, changed: set[str]) -> Numbers:
    """Estimate advantages by `estimator` from the rewards or scores of groups."""
    mask, inputs, recorded = step.mask, step.tensor(settings["inputs"]), step.tensor(name)
    if mask is None or inputs is None or recorded is None:
        return None
    if inputs.ndim == 1:
        inputs = inputs[:, None] * is_last_inside(mask)
    columns = settings | {
        "token_level_rewards": inputs,
        "response_mask": mask.float(),
        "index": groupings(step)[settings["groups"]],
        "values": step.tensor("values"),
    }
    if formula := OTHER_ESTIMATORS.get(settings["estimator"]):
        kept = torch.from_numpy(step.arrays.get("truncated", np.zeros(len(mask))) == 0)
        scores = scores_of(inputs)
        values = formula(scores, Groups.of(columns["index"], scores), kept.float())
        values, parameters = on_tokens(values, mask), set[str]()
    else:
        function = ADVANTAGE_ESTIMATORS.look_up(settings["estimator"])
        parameters = {*inspect.signature(function).parameters}
        try:
            values, _ = function(**{n: x for n, x in columns.items() if n in parameters})
        except (TypeError, AttributeError):  # an input is not recorded
            return None
    if then := THEN.get(settings["then"]):
        values = then(values, mask, float(recorded.abs().max()))
    is_used = changed <= STRUCTURE | parameters
    return [values] if is_used else None


STRUCTURE = {"estimator", "groups", "inputs", "then"}
"""Arguments that every estimator has."""


def rewards(name: str, step: Step, settings: Settings, changed: set[str]) -> Numbers:
    """Return the scores, minus a coefficient times an estimate of the KL."""
    mask, scores, tokens = step.mask, step.tensor("scores"), step.tensor("token_level_scores")
    policy, reference = step.log_probs("old_log_probs"), step.tensor("ref_log_prob")
    if mask is None or scores is None:
        return None
    last = is_last_inside(mask)
    numbers = [scores[:, None] * last if tokens is None else tokens]
    if settings["kl"] != NONE:
        if policy is None or reference is None:
            return None
        kl = KL_ESTIMATORS[settings["kl"]](policy - reference).masked_fill(~mask, 0)
        numbers.append(
            -kl if settings["per"] == "token" else -masked_mean(kl, mask, -1)[:, None] * last
        )
    return [x.sum(1) for x in numbers] if step.arrays[name].ndim == 1 else numbers


UNCLIPPED = "the ratio without clipping"
LOSSES = ("vanilla", "reinforce", "gspo", "geo_mean", "cispo", "sapo", UNCLIPPED)
CLIPPING = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def loss(name: str, step: Step, settings: Settings, changed: set[str]) -> Numbers:
    """Return the policy loss of one update; under the name `loss`, with the KL in the loss."""
    mask, estimates = step.mask, step.tensor("advantages")
    reference, policy = step.tensor("ref_log_prob"), step.log_probs("log_probs", "old_log_probs")
    if mask is None or estimates is None or step.num_updates > 1:
        return None
    zeros = torch.zeros(mask.shape)
    old, current = step.tensor("old_log_probs"), step.tensor("log_probs")
    if old is None or current is None:
        old = current = zeros if policy is None else policy
    ratio, config = log_ratio(current, old, mask), ActorConfig()
    if changed & {*CLIPPING, "loss"} and not ratio.abs().max() > 1e-4:
        return None
    for key in CLIPPING:
        setattr(config, key, settings[key])
    estimates = on_tokens(estimates, mask) if estimates.ndim == 1 else estimates * mask
    losses = -estimates * ratio.exp()
    if settings["loss"] != UNCLIPPED:
        of_tokens = get_policy_loss(settings["loss"]).takes_arguments_of[0]  # type: ignore[attr-defined]
        losses = of_tokens(old, current, estimates, mask, config)[0]
    weights = step.tensor("rollout_is_weights")
    if weights is not None and settings["weights"] == "with":
        losses = losses * weights
    elif "weights" in changed:
        return None

    added = []
    if settings["kl"] != NONE:
        if name != "loss" or reference is None or policy is None:
            return None
        added.append(KL_ESTIMATORS[settings["kl"]](policy - reference))
    size, means = settings["rows"], []
    for values in (losses, *added):
        parts = zip(values.split(size), mask.split(size), strict=True)
        means.append(
            [
                agg_loss(x, m, settings["mode"], loss_scale_factor=settings["factor"])
                for x, m in parts
            ]
        )
    return [torch.stack(of_parts).mean() for of_parts in means]


SOURCES = {
    "the sampler's (rollout_correction.bypass_mode=true)": "rollout_log_probs",
    "those before the update": "old_log_probs",
}
"""Words -> the field from which log-probs may be taken."""
MOST_ROWS = 64


def log_probs(name: str, step: Step, settings: Settings, changed: set[str]) -> Numbers:
    """Return the log-probs of the tokens under the first model, or those of another field."""
    if source := SOURCES.get(settings["source"]):
        is_known = name != source and source in step.arrays and changed == {"source"}
        return [step.arrays[source]] if is_known else None
    recorded = step.arrays[name]
    if step.number != 1 or recorded.ndim == 1:
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
    for prompt, response in [*zip(step.ids("prompts"), step.ids("responses"), strict=True)][
        :MOST_ROWS
    ]:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        if not 0 <= int(ids.min()) <= int(ids.max()) < model.config.vocab_size:
            return None
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float()
        for temperature, rows in zip(temperatures, results, strict=True):
            of_tokens = (logits / temperature).log_softmax(-1)
            rows.append(of_tokens.gather(1, ids[len(prompt) :, None])[:, 0].numpy())
    return results


FORMULAS: dict[str, tuple[Callable[[str, Step, Settings, set[str]], Numbers], str]] = {
    "rewards": (rewards, "rewards"),
    "advantages": (advantages, "advantages"),
    "pg_loss": (loss, "loss"),
    "loss": (loss, "loss"),
    **dict.fromkeys(("rollout_log_probs", "old_log_probs", "log_probs"), (log_probs, "log-probs")),
}
"""Field -> its formula, and the stage whose probes are the arguments."""
DISCOUNTS = (1.0, 0.99, 0.95, 0.9, 0.999, 0.995, 0.98, 0.97, 0.5, 0.0)
CLIPS = (0.2, 0.1, 0.3, 0.28, 0.25, 0.4, 0.5)
TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 1.1, 1.2, 1.5, 2.0)
ESTIMATORS = (
    *("grpo", "rloo", "grpo_batch_std", "reinforce_plus_plus_baseline", "reinforce_plus_plus"),
    *("opo", "gpg", "grpo_passk", "gae", "coati", "remax", *OTHER_ESTIMATORS),
)
OWN = {*OTHER_ESTIMATORS, UNCLIPPED}
CLIP_RATIO, NONE = f"{ACTOR}.clip_ratio", "none"
PROBES: dict[str, tuple[Probe, ...]] = {
    "log-probs": (
        Probe("temperature", f"{ROLLOUT}.temperature temperature", TEMPERATURES),
        Probe("dtype", "", ("float32", "bfloat16"), "log-probs in {}"),
        Probe("source", "", ("the model's", *SOURCES), "log-probs that are {}"),
    ),
    "rewards": (
        Probe("kl", "algorithm.kl_penalty", (NONE, "kl", "low_var_kl", "mse", "abs")),
        Probe("per", "algorithm.kl_penalty_per", ("token", "sequence")),
    ),
    "advantages": (
        Probe(STD, f"algorithm.{STD}", (True, False)),
        Probe("epsilon", "", (1e-6, 1e-4, 1e-8, 1e-5, 1e-3, 0.0), "epsilon={}"),
        Probe("gamma", "algorithm.gamma gamma", DISCOUNTS),
        Probe("lam", "algorithm.lam lam", DISCOUNTS),
        Probe("whiten", "", (True, False), "whiten={}"),
        Probe("groups", "", groupings, "groups {}"),
        Probe("inputs", "", ("rewards", "scores"), "advantages of the {}"),
        Probe("estimator", "algorithm.adv_estimator", ESTIMATORS),
        Probe("then", "", ("left", *THEN), "advantages that are {} afterwards"),
    ),
    "loss": (
        Probe("mode", f"{ACTOR}.loss_agg_mode", tuple(AGGREGATIONS)),
        Probe("factor", f"{ACTOR}.loss_scale_factor", factors),
        Probe("rows", "", micro_batches, "the mean of each micro-batch of {} rows"),
        Probe("loss", f"{ACTOR}.policy_loss.loss_mode", LOSSES),
        Probe("clip_ratio_low", f"{CLIP_RATIO}_low {CLIP_RATIO} epsilon", CLIPS),
        Probe("clip_ratio_high", f"{CLIP_RATIO}_high {CLIP_RATIO} epsilon_high epsilon", CLIPS),
        Probe("clip_ratio_c", f"{CLIP_RATIO}_c", (3.0, math.inf, 2.0, 10.0)),
        Probe("weights", "", ("with", "without"), "the loss {} weights of the rollout"),
        Probe("kl", f"{ACTOR}.kl_loss_type", (NONE, "low_var_kl", "kl", "mse", "abs")),
    ),
}
"""Formula -> the settings that are its arguments."""
COEFFICIENTS = {"rewards": "algorithm.kl_ctrl.kl_coef", "loss": f"{ACTOR}.kl_loss_coef"}
"""Field -> the key of the coefficient of the KL in it."""
MOST_CHANGES, MOST_TRIES = 3, 20_000


def fitting(name: str, step: Step, begin: Settings | None = None) -> list[Settings]:
    """Return the settings with which a field's formula gives the numbers that a side recorded.

    Of these, the ones with the fewest changes of `begin`, or of the run's own, are returned.
    """
    tried = {p.argument: p.tried(step) for p in PROBES[FORMULAS[name][1]]}
    for argument, values in tried.items():
        own = values[0] if begin is None else begin[argument]
        tried[argument] = list(dict.fromkeys([own, *values]))
    start, num_tries = {argument: values[0] for argument, values in tried.items()}, 0
    for count in range(MOST_CHANGES + 1):
        fits: list[Settings] = []
        for chosen in combinations(tried, count):
            for changed in product(*(tried[argument][1:] for argument in chosen)):
                settings = start | dict(zip(chosen, changed, strict=True))
                if (fit := fitted(name, step, settings, {*chosen})) is not None:
                    fits.append(fit)
                if (num_tries := num_tries + 1) > MOST_TRIES:
                    return []
        if fits:
            return fits
    return []


def fitted(name: str, step: Step, settings: Settings, changed: set[str]) -> Settings | None:
    """Return the settings, with the coefficient of a KL that fits; None if the numbers differ.

    A formula gives None if a changed setting has no effect in it.
    """
    formula, stage = FORMULAS[name]
    numbers = formula(name, step, settings, changed)
    if numbers is None:
        return None
    base, *added = (np.asarray(x, dtype=float) for x in numbers)
    recorded = np.asarray(step.numbers.get(name, step.arrays.get(name)), dtype=float)
    if base.ndim == 2:
        mask = step.arrays.get("response_mask", np.ones(base.shape)) != 0
        base, recorded = base * mask, step.on_tokens(recorded, base.shape[1]) * mask
    for unit in added:
        exact = float(((recorded - base) * unit).sum() / max((unit**2).sum(), 1e-20))
        coefficient = float(f"{exact:.{2 if recorded.ndim == 0 else 4}g}")
        if coefficient <= 0 or abs(exact - coefficient) > 2e-3 * coefficient:
            return None
        base, settings = base + coefficient * unit, settings | {"coefficient": coefficient}
    absolute, relative = (1e-3, 0.0) if stage == "log-probs" else (3e-6, 2e-5)
    gap = np.abs(base - recorded)
    return settings if np.all(gap <= absolute + relative * np.abs(recorded)) else None


def formulas_differ(name: str, steps: tuple[Step, Step]) -> bool:
    """Return whether both sides' formulas are known, and none gives both sides' numbers."""
    found = [fitting(name, step) for step in steps] if name in FORMULAS else [[], []]
    return all(found) and not common_settings(name, steps, found)


def common_settings(
    name: str, steps: tuple[Step, Step], found: Sequence[list[Settings]]
) -> list[Settings]:
    """Return the settings of either side that give both sides' numbers."""
    pairs = ((x, step) for side, step in enumerate(steps[::-1]) for x in found[side])
    return [x for x, step in pairs if fitted(name, step, x, set()) == x]
