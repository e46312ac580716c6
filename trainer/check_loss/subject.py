"""A function under test: its parameters are filled by name, and its result is checked.

    subject = subject_of("my_losses.py:my_loss")
    outcome = subject.measure(half, other_half)     # one rank with two micro-batches

The losses of all micro-batches on all ranks are added, as in training. Those of a function with the
parameter `dp_size` are averaged over ranks, as verl's are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.check_loss.batches import ESTIMATOR, POLICY, PREFERENCE, VALUE, Batch, make_batch
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.config import AlgorithmConfig
from trainer.preference.recipe import PreferenceConfig
from verl_like.errors import ConfigError, nearest
from verl_like.registry import load_object
from verl_like.signatures import in_words, is_required, signature_of
from workers.config import ActorConfig, CriticConfig
from workers.losses.aggregate import Denominators
from workers.losses.lm import compute_lm_loss
from workers.losses.pairwise import PAIRWISE_LOSSES
from workers.losses.preference.registry import PREFERENCE_LOSSES
from workers.losses.registry import POLICY_LOSSES, facts_of
from workers.losses.value import compute_value_loss

Outcome = dict[str, Tensor]
"""The result of a function on a batch: its loss and gradient, or an estimator's columns."""
LOSS_SCALE_FACTOR = 16.0


class Kind(NamedTuple):
    """One kind of functions."""

    named: Mapping[str, Any]
    section: Callable[[], Any]
    """The section of the configuration whose defaults fill parameters of its keys' names."""
    variables: Collection[str]
    """The columns that may have the gradient."""


VALUE_LOSSES = {"clipped": compute_value_loss}
PREFERENCES = {**PREFERENCE_LOSSES, **PAIRWISE_LOSSES}
KINDS = {
    POLICY: Kind({**POLICY_LOSSES, "lm": compute_lm_loss}, ActorConfig, ["log_prob"]),
    VALUE: Kind(VALUE_LOSSES, CriticConfig, ["vpreds"]),
    PREFERENCE: Kind(PREFERENCES, PreferenceConfig, ["log_probs", "gap"]),
    ESTIMATOR: Kind(ADVANTAGE_ESTIMATORS, AlgorithmConfig, []),
}
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
    """The columns and counts that it gets."""
    call: Callable[[Batch], Any]
    """(columns and counts of the mini-batch) -> the function's result."""
    variable: str = ""
    """The column that has the gradient."""
    mode: str | None = None
    """The aggregation that it declares."""
    exempt: Collection[str] = ()
    """The relations that it does not promise."""
    equal_cuts: bool = False
    """Whether all micro-batches must have the same number of rows."""

    def measure(self, *parts: Batch, ranks: int = 1) -> Outcome:
        """Return the outcome of a mini-batch in these micro-batches, as many on each rank."""
        counts = {**counts_of(*parts, ranks=ranks), "loss_agg_mode": self.mode}
        if self.kind == ESTIMATOR:
            columns = self._returned({**parts[0], **counts}, parts[0]["response_mask"].shape)
            return dict(zip(("advantages", "returns"), columns, strict=False))
        leaves = [part[self.variable].data.requires_grad_() for part in parts]
        share = 1 / ranks if "dp_size" in self.reads else 1.0
        loss = torch.zeros(())
        for part, leaf in zip(parts, leaves, strict=True):
            losses = self._returned({**part, **counts, self.variable: leaf}, leaf.shape[:1])
            loss = loss + share * losses[0].sum()
        gradients = torch.autograd.grad(loss, leaves)
        return {"loss": loss.data, "gradient": torch.cat(gradients)}

    def _returned(self, batch: Batch, shape: torch.Size) -> Sequence[Tensor]:
        """Return the loss or the columns of this shape, or say why the function returns none."""
        try:
            result = self.call(batch)
        except Exception as error:
            mask = batch["response_mask"].tolist() if "response_mask" in batch else "of pairs"
            words = f"{type(error).__name__} on a batch {mask}: {error}"
            raise ConfigError(f"{self.name} raises {words}") from error
        values = result if isinstance(result, tuple) else (result,)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if self.kind == ESTIMATOR:
            is_right = len(tensors) == len(values) <= 2 and {t.shape for t in tensors} == {shape}
            words = f"an estimator returns (advantages, returns) of the mask's shape {list(shape)}"
        else:
            tensors = [tensor for tensor in tensors if tensor.requires_grad] or tensors
            shapes = [shape, torch.Size()] if self.kind == PREFERENCE else [torch.Size()]
            is_right = len(tensors) == 1 and tensors[0].requires_grad and tensors[0].shape in shapes
            words = f"return one loss {list(shapes[0])} with a gradient by {self.variable}, or "
            words += "(loss, metrics)"
        if not is_right:
            types = ", ".join(map(_described, tensors or values))
            raise ConfigError(f"{self.name} returns {types}: {words}.")
        return tensors


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    gradient = "with" if value.requires_grad else "without"
    return f"a tensor {list(value.shape)} {gradient} a gradient"


def counts_of(*parts: Batch, ranks: int = 1) -> dict[str, Any]:
    """Return the numbers of the whole mini-batch that a function may be told."""
    masks = [part["response_mask"] for part in parts if "response_mask" in part]
    return {
        "batch_num_tokens": sum(int(mask.sum()) for mask in masks),
        "global_batch_size": sum(int(mask.any(1).sum()) for mask in masks),
        "loss_scale_factor": LOSS_SCALE_FACTOR,
        "dp_size": ranks,
        "num_micro_batches": len(parts) // ranks,
    }


def subject_of(target: Any, kind: str | None = None, **settings: Any) -> Subject:
    """Return a function, or the one that a name or a path stands for, as a subject.

    `settings` fill the parameters of these names.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"there is no kind {kind!r}: {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    if not isinstance(target, str):
        return match(target, getattr(target, "__name__", repr(target)), kind, settings)
    named = {name: KINDS[name].named for name in ([kind] if kind else KINDS)}
    kinds = [name for name in named if target in named[name]]
    if len(kinds) > 1:
        raise ConfigError(f"{target} is a {' and a '.join(kinds)} function: say --kind {kinds[0]}.")
    if kinds:
        return match(named[kinds[0]][target], target, kinds[0], settings)
    if "." in target or ":" in target:
        return match(load_object(target, "check-loss"), target, kind, settings)
    names = sorted({name for functions in named.values() for name in functions})
    words = f"there are {', '.join(names)}, your own by FILE.py:NAME, trl:NAME and verl:NAME"
    raise ConfigError(f"unknown loss or estimator {target!r}; {words}.{nearest(target, names)}")


def match(function: Any, name: str, kind: str | None, settings: Mapping[str, Any]) -> Subject:
    """Return a subject whose parameters are filled by their names, or say which ones are not."""
    signature = signature_of(function) if callable(function) else None
    if signature is None:
        raise ConfigError(f"{name} is a {type(function).__name__}, not a function with parameters.")
    fits = {key: _fit(signature, key, settings) for key in ([kind] if kind else KINDS)}
    kind = min(fits, key=lambda key: len(fits[key][1]))
    filled, missing = fits[kind]
    if missing:
        columns = ", ".join([*make_batch(kind, "1"), *counts_of()])
        raise ConfigError(
            f"{name} takes {in_words(signature)}, but for a {kind} function these parameters are "
            f"missing or unknown: {', '.join(missing)}. Known are {columns}, and all settings: "
            "rename the parameter, give it a default, or set it by --set NAME=VALUE."
        )
    facts, section = facts_of(function), KINDS[kind].section()
    filled = {n: key for n, key in filled.items() if key != "chosen_tokens" or facts.choose_tokens}
    defaults = {each.name: each.default for each in signature.parameters.values()}
    mode = settings.get("loss_agg_mode", defaults.get("loss_agg_mode"))
    rest = [each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]
    counts = {*Denominators.__annotations__} - {*filled.values()} if rest else set()
    variables = [column for column in KINDS[kind].variables if column in filled.values()]

    def call(batch: Batch) -> Any:
        if "desirable" in filled.values():  # rows with a label, not pairs
            batch = {k: v[:, 0] if getattr(v, "ndim", 0) > 1 else v for k, v in batch.items()}
        known = {**vars(section), "config": section, "rollout_is_weights": None, **batch}
        known |= {key: value for key, value in settings.items() if key != "loss_agg_mode"}
        arguments = {name: known[key] for name, key in filled.items()}
        arguments |= {name: {key: known[key] for key in counts} for name in rest}
        bound = inspect.BoundArguments(signature, arguments)
        return function(*bound.args, **bound.kwargs)

    return Subject(
        *(name, kind, {*filled.values(), *counts}, call, "".join(variables[:1])),
        mode="token-mean" if mode is inspect.Parameter.empty else mode,
        exempt=["finite_differences"] if facts.holds_weights else [],
    )


def _fit(
    signature: inspect.Signature, kind: str, settings: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """Return what fills each parameter in a function of this kind, and what nothing fills."""
    columns, variables = make_batch(kind, "1"), KINDS[kind].variables
    offered = {*columns, *counts_of(), *settings}
    offered |= {"config", "rollout_is_weights", "loss_agg_mode"}
    filled, missing = dict[str, str](), list[str]()
    for name, parameter in signature.parameters.items():
        key = _canonical(name, columns)
        if key in offered or (is_required(parameter) and key in vars(KINDS[kind].section())):
            filled[name] = key
        elif is_required(parameter):
            missing.append(name)
    return filled, missing + [*variables][: not {*variables} & {*filled.values()}]


def _canonical(parameter: str, columns: Batch) -> str:
    """Return the name here of a column or count that a parameter asks for."""
    if parameter in columns:
        return parameter
    name = re.sub(r"^new_|per_token_", "", parameter)
    name = re.sub(r"log_?p(rob)?s?$", "log_prob", name)
    return next((key for key, others in ALIASES.items() if name in others.split()), name)
