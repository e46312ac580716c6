"""A function under test, whose parameters are filled by name and whose result is checked.

    subject = subject_of("my_losses.py:my_loss")
    outcome = subject.measure(half, other_half)     # one rank with two micro-batches

The losses of all micro-batches on all ranks are added, as in training. The losses of a function
with the parameter `dp_size` are averaged over ranks, as verl's are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.config import AlgorithmConfig
from trainer.preference.recipe import PreferenceConfig
from trainer.tools.check_loss.batches import PAIRED, Batch, make_batch
from verl_like.errors import ConfigError, nearest
from verl_like.registry import format_signature, is_required, load_object, signature_of
from workers.config import ActorConfig, CriticConfig
from workers.losses.aggregate import Denominators, compute_lm_loss
from workers.losses.preference import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from workers.losses.registry import POLICY_LOSSES, traits_of
from workers.losses.value import compute_value_loss

Measurement = dict[str, Tensor]
"""The result of a function on a batch: its loss and gradient, or an estimator's columns."""
LOSS_SCALE_FACTOR = 16.0
KINDS: Mapping[str, Mapping[str, Any]] = {
    "preference": {**PREFERENCE_LOSSES, **REWARD_MODEL_LOSSES},
    "policy": {**POLICY_LOSSES, "lm": compute_lm_loss},
    "value": {"clipped": compute_value_loss},
    "estimator": ADVANTAGE_ESTIMATORS,
}
"""Kind -> our functions by name.

A function whose parameters fit several kinds gets the first of them.
"""
VARIABLES = {"policy": ["log_prob"], "value": ["vpreds"], "preference": ["log_probs", "gap"]}
"""Kind -> the columns by which a loss may be differentiated."""
SECTIONS = (PreferenceConfig, AlgorithmConfig, CriticConfig, ActorConfig)
DEFAULTS = {name: value for section in SECTIONS for name, value in vars(section()).items()}
"""Values of required parameters that are named like configuration keys."""
DEFAULTS |= {"config": ActorConfig(), "rollout_is_weights": None}
REWARD_PARAMETERS = {*"response responses solution_str solution_strs ground_truth".split()}
"""Parameters of a reward function, which no loss has."""
ALIASES = {
    "response_mask": "mask action_mask loss_mask completion_mask eos_mask",
    "advantages": "adv advs",
    "index": "uid group_ids groups",
    "token_level_rewards": "rewards",
    "batch_num_tokens": "num_tokens num_items_in_batch total_tokens",
    "dp_size": "world_size num_processes",
    "num_micro_batches": "gradient_accumulation_steps accumulation_steps",
}
"""Name of a column or count -> its other names, apart from the forms of `log_prob`."""


@dataclass(frozen=True)
class Subject:
    """A function under test."""

    name: str
    kind: str
    reads: Collection[str]
    """The columns, counts and settings that the function gets."""
    call: Callable[[Batch], Any]
    """Calls the function with the columns and counts of the mini-batch."""
    variable: str = ""
    """The column by which the loss is differentiated."""
    mode: str | None = None
    """The loss_agg_mode that the function declares."""
    settings: Collection[str] = ()
    """The names of the settings that the function takes."""
    exempt: Collection[str] = ()
    """Relations that need not hold for this function."""
    equal_cuts: bool = False
    """True if all micro-batches must have the same number of rows."""

    def measure(self, *parts: Batch, ranks: int = 1) -> Measurement:
        """Return the outcome of a mini-batch in these micro-batches, spread evenly over ranks."""
        counts = {**counts_of(*parts, ranks=ranks), "loss_agg_mode": self.mode}
        weight = 1 / ranks if "dp_size" in self.reads else 1.0
        outcomes = [self._measure({**part, **counts}, weight) for part in parts]
        joined = {name: [outcome[name] for outcome in outcomes] for name in outcomes[0]}
        return {n: torch.cat(c) if c[0].ndim else torch.stack(c).sum() for n, c in joined.items()}

    def _measure(self, batch: Batch, weight: float) -> Measurement:
        """Return the outcome of a micro-batch; an error names the function and the batch."""
        mask = batch["response_mask"]
        arguments = {n: c.clone() if isinstance(c, Tensor) else c for n, c in batch.items()}
        try:
            if self.kind == "estimator":
                columns = self._checked(self.call(arguments), mask.shape)
                return dict(zip(("advantages", "returns"), columns, strict=False))
            leaf = arguments[self.variable].requires_grad_()
            arguments[self.variable] = leaf.clone()  # not a leaf, so it may be changed in place
            loss = weight * self._checked(self.call(arguments), mask.shape[:1])[0].sum()
            (gradient,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
            return {"loss": loss.data, "gradient": gradient}
        except ConfigError:
            raise
        except Exception as error:
            words = f"{type(error).__name__} on a batch {mask.tolist()}: {error}"
            raise ConfigError(f"{self.name} raises {words}") from error

    def _checked(self, result: Any, shape: torch.Size) -> list[Tensor]:
        """Return the loss, or the estimator's columns; raise for other types and shapes."""
        values = result if isinstance(result, tuple) else (result,)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if self.kind == "estimator":
            is_right = len(tensors) == len(values) <= 2 and {t.shape for t in tensors} == {shape}
            words = f"it must return (advantages, returns), both of the mask's shape {list(shape)}"
        else:
            tensors = [tensor for tensor in tensors if tensor.requires_grad]
            shapes = [shape, torch.Size()][self.kind != "preference" :]
            is_right = len(tensors) == 1 and tensors[0].shape in shapes
            words = f"it must return one loss of shape {list(shapes[0])} that depends on "
            words += f"{self.variable}, or (loss, metrics)"
        if not is_right:
            raise ConfigError(f"{self.name} returns {', '.join(map(_described, values))}: {words}.")
        return tensors


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    gradient = "with" if value.requires_grad else "without"
    return f"a tensor {list(value.shape)} {gradient} a gradient"


def check_name(name: str, names: Iterable[str], words: str, advice: str = "") -> None:
    """Raise an error that begins with `words` and ends with `advice` if `names` lacks `name`."""
    if name not in {*names}:
        known = f"Known: {', '.join(names)}.{advice}"
        raise ConfigError(f"{words} {name!r}.{nearest(name, names)} {known}")


def look_up(
    name: str,
    kind: str | None,
    named: Mapping[str, Mapping[str, Any]],
    words: str,
    advice: str = "",
) -> tuple[str, Any]:
    """Return the kind and the function of this name.

    The error for an unknown name begins with `words` and ends with `advice`.
    """
    searched = {key: named[key] for key in named if kind in (None, key)}
    names = dict.fromkeys(n for functions in searched.values() for n in functions)
    check_name(name, [*names], words, advice)
    kind, *others = (key for key in searched if name in searched[key])
    if others:
        raise ConfigError(
            f"{name} is of the kinds {kind} and {others[0]}. Choose one, such as --kind {kind}."
        )
    return kind, named[kind][name]


def counts_of(*parts: Batch, ranks: int = 1) -> dict[str, Any]:
    """Return the counts of the whole mini-batch that a function may get as parameters."""
    masks = [part["response_mask"] for part in parts]
    return {
        "batch_num_tokens": sum(int(mask.sum()) for mask in masks),
        "global_batch_size": sum(int(mask.any(1).sum()) for mask in masks),
        "loss_scale_factor": LOSS_SCALE_FACTOR,
        "dp_size": ranks,
        "num_micro_batches": len(parts) // ranks,
    }


def subject_of(target: Any, kind: str | None = None, **settings: Any) -> Subject:
    """Return a function as a subject; `target` is the function, its name or its path.

    `settings` are values of the function's parameters, by name.
    """
    if kind is not None:
        check_name(kind, KINDS, "there is no kind")
    function, name = target, getattr(target, "__name__", str(target))
    if isinstance(target, str) and ("." in target or ":" in target):
        function = load_object(target, "check-loss")
    elif isinstance(target, str):
        advice = " Your own: FILE.py:NAME or MODULE.NAME."
        kind, function = look_up(target, kind, KINDS, "there is no loss or estimator", advice)
    return match(function, name, kind, settings)


def match(function: Any, name: str, kind: str | None, settings: Mapping[str, Any]) -> Subject:
    """Return a subject whose parameters are filled by name; raise for parameters that cannot be."""
    function = getattr(function, "forward", function)  # for a module
    signature = signature_of(function) if callable(function) else None
    if signature is None:
        words = "not a function with parameters"
        raise ConfigError(f"{name} is of the type {type(function).__name__}, {words}.")
    fits = {key: _fit(function, key, settings) for key in ([kind] if kind else KINDS)}
    kind = min(fits, key=lambda key: [*fits[key].values()].count(""))
    filled = fits[kind]
    missing = [parameter for parameter in filled if not filled[parameter]]
    if missing:
        of_reward = REWARD_PARAMETERS.intersection(missing)
        if of_reward:
            raise ConfigError(
                f"{name} reads {', '.join(sorted(of_reward))}, so it is a reward function, not a "
                "loss or an estimator. To try it on rows of your data: verl-like check "
                "reward=FILE.py:NAME data.train_files=... actor_rollout_ref.model.path=..."
            )
        raise ConfigError(
            f"{name} has the parameters {format_signature(signature)}, but the kind {kind} has no "
            f"{', '.join(missing)}. It has {', '.join([*_columns(kind), *counts_of()])}, and all "
            "settings. Rename the parameter, give it a default, or set NAME=VALUE (with --set on "
            "the command line)."
        )
    parameters, reads = signature.parameters, {*filled.values()}
    mode = parameters["loss_agg_mode"].default if "loss_agg_mode" in parameters else None
    mode = settings.get("loss_agg_mode", "token-mean" if mode is inspect.Parameter.empty else mode)
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]

    def call(batch: Batch) -> Any:
        if "desirable" in reads:  # labeled rows, not pairs
            batch = {k: v[:, 0] if getattr(v, "ndim", 0) > 1 else v for k, v in batch.items()}
        known = {**DEFAULTS, **batch, **settings, "loss_agg_mode": batch["loss_agg_mode"]}
        arguments = {name: known[key] for name, key in filled.items()}
        first = [arguments.pop(name) for name in by_position if name in filled]
        try:
            return function(*first, **arguments)
        except SystemExit as error:
            raise ConfigError(f"{name} ends the process: sys.exit({error.code!r}).") from error

    variable = next((key for key in VARIABLES.get(kind, ()) if key in reads), "")
    exempt = ["finite_differences"] if traits_of(function).holds_weights else []
    return Subject(name, kind, reads, call, variable, mode, {*reads, "loss_agg_mode"}, exempt)


def _columns(kind: str) -> list[str]:
    return [name for name in make_batch("1") if (name in PAIRED) == (kind == "preference")]


def _fit(function: Any, kind: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return parameter -> the name of the value that fills it, or "" if none does."""
    columns, filled = _columns(kind), dict[str, str]()
    optional = {*columns, *counts_of(), *settings, "config", "rollout_is_weights", "loss_agg_mode"}
    optional -= set() if traits_of(function).choose_tokens else {"chosen_tokens"}
    for name, parameter in inspect.signature(function).parameters.items():
        key = name if name in columns else _canonical(name)
        if parameter.kind is parameter.VAR_KEYWORD:
            filled |= {key: key for key in {*Denominators.__annotations__} - {*filled.values()}}
        elif key in optional or is_required(parameter):
            filled[name] = key if key in {*optional, *DEFAULTS} else ""
    variables = VARIABLES.get(kind, [])
    return filled | dict.fromkeys(variables[: not {*variables} & {*filled.values()}], "")


def _canonical(parameter: str) -> str:
    """Return this project's name for the column or count that a parameter means."""
    name = re.sub(r"^new_|per_token_", "", parameter)
    name = re.sub(r"log_?p(rob)?s?$", "log_prob", name)
    return next((key for key, others in ALIASES.items() if name in others.split()), name)
