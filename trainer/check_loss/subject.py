"""A function under test: its parameters are filled by name, and its result is checked.

    subject = subject_of("my_losses.py:my_loss")
    outcome = subject.measure(half, other_half)     # one rank with two micro-batches

The losses of all micro-batches on all ranks are added, as in training. Those of a function with the
parameter `dp_size` are averaged over ranks, as verl's are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.check_loss.batches import Batch, make_batch
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

POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
Outcome = dict[str, Tensor]
"""The result of a function on a batch: its loss and gradient, or an estimator's columns."""
LOSS_SCALE_FACTOR = 16.0


class Kind(NamedTuple):
    """The functions of one kind, and what fills their parameters."""

    named: Mapping[str, Any]
    section: Callable[[], Any]
    """The section of the configuration whose defaults fill parameters of its keys' names."""
    variables: Collection[str]
    """The columns that may have the gradient."""


KINDS = {
    "policy": Kind({**POLICY_LOSSES, "lm": compute_lm_loss}, ActorConfig, ["log_prob"]),
    "value": Kind({"clipped": compute_value_loss}, CriticConfig, ["vpreds"]),
    "preference": Kind(
        {**PREFERENCE_LOSSES, **PAIRWISE_LOSSES}, PreferenceConfig, ["log_probs", "gap"]
    ),
    "estimator": Kind(ADVANTAGE_ESTIMATORS, AlgorithmConfig, []),
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
    """The columns, counts and settings that it gets."""
    call: Callable[[Batch], Any]
    """(columns and counts of the mini-batch) -> the function's result."""
    variable: str = ""
    """The column that has the gradient."""
    mode: str | None = None
    """The aggregation that it declares."""
    settings: Collection[str] = ()
    """The names that a setting may have."""
    exempt: Collection[str] = ()
    """The relations that it does not promise."""
    equal_cuts: bool = False
    """Whether all micro-batches must have the same number of rows."""

    def measure(self, *parts: Batch, ranks: int = 1) -> Outcome:
        """Return the outcome of a mini-batch in these micro-batches, as many on each rank."""
        counts = {**counts_of(*parts, ranks=ranks), "loss_agg_mode": self.mode}
        if self.kind == "estimator":
            columns = self._returned({**parts[0], **counts}, parts[0]["response_mask"].shape)
            return dict(zip(("advantages", "returns"), columns, strict=False))
        share = 1 / ranks if "dp_size" in self.reads else 1.0
        losses, gradients = [], []
        for part in parts:
            leaf = part[self.variable].clone().requires_grad_()
            argument = leaf.clone()  # which may be changed in place, as a model's output may
            loss = self._returned({**part, **counts, self.variable: argument}, leaf.shape[:1])[0]
            part[self.variable].copy_(argument.data)
            with named_errors(self.name, part):
                gradients += torch.autograd.grad(share * loss.sum(), leaf, materialize_grads=True)
            losses.append(share * loss.data.sum())
        return {"loss": torch.stack(losses).sum(), "gradient": torch.cat(gradients)}

    def _returned(self, batch: Batch, shape: torch.Size) -> Sequence[Tensor]:
        """Return the loss or the columns of this shape, or say why the function returns none."""
        with named_errors(self.name, batch):
            result = self.call(batch)
        values = result if isinstance(result, tuple) else (result,)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if self.kind == "estimator":
            is_right = len(tensors) == len(values) <= 2 and {t.shape for t in tensors} == {shape}
            words = f"an estimator returns (advantages, returns) of the mask's shape {list(shape)}"
        else:
            tensors = [tensor for tensor in tensors if tensor.requires_grad] or tensors
            shapes = [shape, torch.Size()] if self.kind == "preference" else [torch.Size()]
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


@contextmanager
def named_errors(name: str, batch: Batch) -> Iterator[None]:
    """Name the function that raises, and the batch."""
    try:
        yield
    except Exception as error:
        mask = batch["response_mask"].tolist() if "response_mask" in batch else "of pairs"
        words = f"{type(error).__name__} on a batch {mask}: {error}"
        raise ConfigError(f"{name} raises {words}") from error


def check_name(name: str, names: Iterable[str], words: str) -> None:
    """Raise an error that begins with these words if the name is not among the names."""
    if name not in {*names}:
        raise ConfigError(f"{words} {name!r}; there are {', '.join(names)}.{nearest(name, names)}")


def look_up(
    name: str, kind: str | None, named: Mapping[str, Mapping[str, Any]], words: str
) -> tuple[str, Any]:
    """Return the kind and the function of this name; the words begin an error."""
    searched = {key: named[key] for key in named if kind in (None, key)}
    kinds = [key for key in searched if name in searched[key]]
    if len(kinds) > 1:
        raise ConfigError(f"{name} is of the kinds {' and '.join(kinds)}: say --kind {kinds[0]}.")
    check_name(name, [each for names in searched.values() for each in names], words)
    return kinds[0], searched[kinds[0]][name]


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
    if kind is not None:
        check_name(kind, KINDS, "there is no kind")
    if not isinstance(target, str):
        return match(target, getattr(target, "__name__", repr(target)), kind, settings)
    if "." in target or ":" in target:
        return match(load_object(target, "check-loss"), target, kind, settings)
    named = {key: KINDS[key].named for key in KINDS}
    words = "not FILE.py:NAME, trl:NAME or verl:NAME, and not the name of a loss or estimator:"
    kind, function = look_up(target, kind, named, words)
    return match(function, target, kind, settings)


def match(function: Any, name: str, kind: str | None, settings: Mapping[str, Any]) -> Subject:
    """Return a subject whose parameters are filled by their names, or say which ones are not."""
    function = getattr(function, "forward", function)  # of a module
    signature = signature_of(function) if callable(function) else None
    if signature is None:
        words = "not a function with parameters"
        raise ConfigError(f"{name} is of the type {type(function).__name__}, {words}.")
    fits = {key: _fit(function, key, settings) for key in ([kind] if kind else KINDS)}
    kind = min(fits, key=lambda key: len(fits[key][1]))
    filled, missing = fits[kind]
    if missing:
        columns = ", ".join([*make_batch(kind, "1"), *counts_of()])
        raise ConfigError(
            f"{name} takes {in_words(signature)}, but for --kind {kind} these parameters are "
            f"missing or unknown: {', '.join(missing)}. Known are {columns}, and all settings: "
            "rename the parameter, give it a default, or set it by --set NAME=VALUE."
        )
    section, parameters = KINDS[kind].section(), signature.parameters
    reads = {*filled.values()}
    mode = parameters["loss_agg_mode"].default if "loss_agg_mode" in parameters else None
    mode = settings.get("loss_agg_mode", "token-mean" if mode is inspect.Parameter.empty else mode)

    def call(batch: Batch) -> Any:
        if "desirable" in reads:  # rows with a label, not pairs
            batch = {k: v[:, 0] if getattr(v, "ndim", 0) > 1 else v for k, v in batch.items()}
        known = {**vars(section), "config": section, "rollout_is_weights": None, **batch}
        known |= {**settings, "loss_agg_mode": batch["loss_agg_mode"]}
        arguments = {name: known[key] for name, key in filled.items()}
        first = [n for n in filled if n in parameters and parameters[n].kind is POSITIONAL_ONLY]
        return function(*[arguments.pop(name) for name in first], **arguments)

    return Subject(
        *(name, kind, reads, call),
        variable="".join([name for name in KINDS[kind].variables if name in reads][:1]),
        mode=mode,
        settings={*reads, "loss_agg_mode"},
        exempt=["finite_differences"] if facts_of(function).holds_weights else [],
    )


def _fit(function: Any, kind: str, settings: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return what fills each parameter in a function of this kind, and what nothing fills."""
    columns, variables = make_batch(kind, "1"), KINDS[kind].variables
    offered = {*columns, *counts_of(), *settings, "config", "rollout_is_weights", "loss_agg_mode"}
    offered -= set() if facts_of(function).choose_tokens else {"chosen_tokens"}
    filled, missing = dict[str, str](), list[str]()
    for name, parameter in inspect.signature(function).parameters.items():
        key = _canonical(name, columns)
        if parameter.kind is parameter.VAR_KEYWORD:
            filled |= {key: key for key in {*Denominators.__annotations__} - {*filled.values()}}
        elif key in offered or (is_required(parameter) and key in vars(KINDS[kind].section())):
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
