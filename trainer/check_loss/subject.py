"""A function under test: its parameters are filled by name, and its result is checked.

    subject = subject_of("my_losses.py:my_loss")
    outcome = subject.measure([[half, other_half]])     # one rank with two micro-batches

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

from trainer.check_loss.batches import ESTIMATOR, PREFERENCE, Batch, make_batch
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.config import AlgorithmConfig
from trainer.preference.recipe import PreferenceConfig
from verl_like.errors import ConfigError, nearest
from verl_like.registry import load_object
from verl_like.signatures import in_words, is_asked, signature_of
from workers.config import ActorConfig, CriticConfig
from workers.losses.lm import compute_lm_loss
from workers.losses.pairwise import PAIRWISE_LOSSES
from workers.losses.preference.registry import PREFERENCE_LOSSES
from workers.losses.registry import GIVEN, POLICY_LOSSES, facts_of
from workers.losses.value import compute_huber_value_loss, compute_value_loss

Outcome = dict[str, Tensor]
"""The result of a function on a batch: its loss and gradient, or an estimator's columns."""
LOSS_SCALE_FACTOR = 16.0
COUNTS = (*GIVEN[-3:], "dp_size", "num_micro_batches")
"""What a function may be told about the whole mini-batch."""


class Kind(NamedTuple):
    """What is known about one kind of functions."""

    named: Mapping[str, Any]
    section: Callable[[], Any]
    """The section of the configuration whose defaults fill parameters of its keys' names."""
    variables: Sequence[str]
    """The columns that may have the gradient."""


VALUE_LOSSES = {"clipped": compute_value_loss, "huber": compute_huber_value_loss}
PREFERENCES = {**PREFERENCE_LOSSES, **PAIRWISE_LOSSES}
KINDS = {
    "policy": Kind({**POLICY_LOSSES, "lm": compute_lm_loss}, ActorConfig, ["log_prob"]),
    "value": Kind(VALUE_LOSSES, CriticConfig, ["vpreds"]),
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
"""Name of a column or count -> what else it is called, apart from the forms of `log_prob`."""


@dataclass(frozen=True)
class Subject:
    """A function under test."""

    name: str
    kind: str
    reads: Collection[str]
    """The columns and counts that it gets."""
    call: Callable[[Batch, Mapping[str, Any]], Any]
    """(batch, facts about the whole mini-batch) -> what the function returns."""
    variable: str = "log_prob"
    """The column that has the gradient."""
    mode: str | None = None
    """The aggregation that it declares."""
    choose: Callable[[Batch], Tensor] | None = None
    equal_cuts: bool = False
    """Whether all micro-batches must have the same number of rows."""
    exempt: Collection[str] = ()
    """The relations that it does not promise."""

    def at_once(self, batch: Batch) -> Outcome:
        """Return the outcome of a mini-batch in one micro-batch."""
        return self.measure([[self.with_choice(batch)]])

    def with_choice(self, batch: Batch) -> Batch:
        """Return the batch with the tokens that the driver chooses from the whole mini-batch."""
        return {**batch, "chosen_tokens": self.choose(batch)} if self.choose else batch

    def measure(self, ranks: Sequence[Sequence[Batch]]) -> Outcome:
        """Return the outcome of a mini-batch that is cut into these micro-batches of each rank."""
        parts = [part for rank in ranks for part in rank]
        if self.kind == ESTIMATOR:
            return self.columns(parts[0])
        facts = self.facts(parts, len(ranks), len(ranks[0]))
        share = 1 / len(ranks) if "dp_size" in self.reads else 1.0
        losses, gradients = [], []
        for part in parts:
            leaf = part[self.variable].clone().requires_grad_()
            losses.append(share * self.loss({**part, self.variable: leaf}, facts))
            gradients += torch.autograd.grad(losses[-1].sum(), leaf)
        loss = torch.cat(losses) if losses[0].ndim else torch.stack(losses).sum()
        return {"loss": loss.detach(), "gradient": torch.cat(gradients)}

    def facts(self, parts: Sequence[Batch], dp_size: int = 1, cuts: int = 1) -> dict[str, Any]:
        """Return what a call is told about the whole mini-batch."""
        masks = [part["response_mask"] for part in parts if "response_mask" in part]
        return {
            "batch_num_tokens": sum(int(mask.sum()) for mask in masks),
            "global_batch_size": sum(int(mask.any(1).sum()) for mask in masks),
            "loss_scale_factor": LOSS_SCALE_FACTOR,
            "dp_size": dp_size,
            "num_micro_batches": cuts,
            "loss_agg_mode": self.mode,
        }

    def loss(self, batch: Batch, facts: Mapping[str, Any]) -> Tensor:
        """Return the loss, or say why the function returns none."""
        returned = self._returned(batch, facts)
        tensors = [each for each in returned if isinstance(each, Tensor)]
        losses = [each for each in tensors if each.requires_grad]
        shape = [len(batch[self.variable])] if self.kind == PREFERENCE else []
        shapes = ", ".join(str(list(tensor.shape)) for tensor in losses)
        found = ", ".join(type(each).__name__ for each in returned)
        for is_wrong, words in (
            (not tensors, f"{found}: no tensor. Return the loss, or (loss, metrics)"),
            (not losses, f"a loss that has no gradient by {self.variable}: is it detached?"),
            (len(losses) > 1, f"{len(losses)} tensors with a gradient: return (loss, metrics)"),
            (shapes != f"{shape}", f"the shape {shapes}, and a {self.kind} loss has {shape}"),
        ):
            if is_wrong:
                raise ConfigError(f"{self.name} returns {words}.")
        return losses[0]

    def columns(self, batch: Batch) -> Outcome:
        """Return the advantages and returns, or say why the function returns none."""
        returned = self._returned(batch, self.facts([batch]))
        shape = batch["response_mask"].shape
        if {getattr(each, "shape", None) for each in returned} != {shape} or len(returned) > 2:
            found = ", ".join(str(getattr(each, "shape", type(each).__name__)) for each in returned)
            words = f"an estimator returns (advantages, returns) of the mask's shape {list(shape)}"
            raise ConfigError(f"{self.name} returns {found}: {words}.")
        return dict(zip(("advantages", "returns"), returned, strict=False))

    def _returned(self, batch: Batch, facts: Mapping[str, Any]) -> tuple[Any, ...]:
        try:
            returned = self.call(batch, facts)
        except Exception as error:
            mask = batch["response_mask"].tolist() if "response_mask" in batch else "of pairs"
            words = f"{type(error).__name__} on a batch {mask}: {error}"
            raise ConfigError(f"{self.name} raises {words}") from error
        return returned if isinstance(returned, tuple) else (returned,)


def subject_of(target: Any, kind: str | None = None, **settings: Any) -> Subject:
    """Return a function, or the one that a name or a path stands for, as a subject.

    `settings` fill the parameters of these names.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"there is no kind {kind!r}: {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    if not isinstance(target, str):
        return match(target, getattr(target, "__name__", repr(target)), kind, settings)
    kinds = [each for each in KINDS if kind in (None, each) and target in KINDS[each].named]
    if len(kinds) > 1:
        raise ConfigError(f"{target} is a {' and a '.join(kinds)} function: say --kind {kinds[0]}.")
    if kinds:
        return match(KINDS[kinds[0]].named[target], target, kinds[0], settings)
    if "." in target or ":" in target:
        return match(load_object(target, "check-loss"), target, kind, settings)
    names = sorted({name for each in KINDS if kind in (None, each) for name in KINDS[each].named})
    words = f"there are {', '.join(names)}, your own by FILE.py:NAME, trl:NAME and verl:NAME"
    raise ConfigError(f"unknown loss or estimator {target!r}; {words}.{nearest(target, names)}")


def match(function: Any, name: str, kind: str | None, settings: Mapping[str, Any]) -> Subject:
    """Return a subject whose parameters are filled by their names, or say which ones are not."""
    signature = signature_of(function) if callable(function) else None
    if signature is None:
        raise ConfigError(f"{name} is a {type(function).__name__}, not a function with parameters.")
    parameters = signature.parameters.values()
    fits = {each: _fit(signature, each, settings) for each in ([kind] if kind else KINDS)}
    kind = min(fits, key=lambda each: len(fits[each][1]))
    keys, missing = fits[kind]
    if missing:
        columns = ", ".join([*make_batch(kind, "1"), *COUNTS])
        raise ConfigError(
            f"{name} takes {in_words(signature)}, and as a {kind} function it lacks or asks for "
            f"{', '.join(missing)}. There are {columns}, and the settings by their keys: rename "
            "the parameter, give it a default, or a value by --set NAME=VALUE."
        )
    reads, section = {*keys.values()}, KINDS[kind].section()
    named = [*KINDS[kind].variables, ""]
    variable = next((each for each in named if each in reads), "")
    rest = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    others = {*(GIVEN[-3:] if variable else GIVEN), *({*settings} - {*GIVEN})} - reads
    rest_reads = others if rest else set()

    def call(batch: Batch, facts: Mapping[str, Any]) -> Any:
        if "desirable" in reads:  # rows with a label, not pairs
            batch = {k: v[:, 0] if v.ndim > 1 else v for k, v in batch.items()}
        known = {"config": section, "rollout_is_weights": None, **batch, **facts, **settings}
        wanted = {p.name: keys[p.name] for p in parameters if is_asked(p) or keys[p.name] in known}
        known = {**vars(section), **known}
        arguments = {name: known[key] for name, key in wanted.items()}
        arguments |= {name: {key: known[key] for key in rest_reads} for name in rest}
        bound = inspect.BoundArguments(signature, arguments)
        return function(*bound.args, **bound.kwargs)

    def chosen(batch: Batch) -> Any:
        columns = [batch[each] for each in ("old_log_prob", "advantages", "response_mask")]
        return choose and choose(*columns, torch.Generator().manual_seed(0), config=section)

    facts, default = facts_of(function), signature.parameters.get("loss_agg_mode")
    choose = facts.choose_tokens
    mode = settings.get("loss_agg_mode", default and default.default)
    mode = "token-mean" if mode is inspect.Parameter.empty else mode
    exempt = ["finite_differences"] if facts.holds_weights else []
    pick, reads = chosen if choose else None, reads | rest_reads
    return Subject(name, kind, reads, call, variable or named[0], mode, pick, False, exempt)


Fit = tuple[dict[str, str], list[str]]
"""Return the column or setting for each parameter, and the parameters without one."""


def _fit(signature: inspect.Signature, kind: str, settings: Mapping[str, Any]) -> Fit:
    """Return what fills each parameter in a function of this kind, and what nothing fills."""
    columns, variables = make_batch(kind, "1"), KINDS[kind].variables
    known = {*columns, *GIVEN, *COUNTS, *settings, *vars(KINDS[kind].section())}
    keys = {name: _canonical(name, columns) for name in signature.parameters}
    parameters = signature.parameters.values()
    missing = [p.name for p in parameters if is_asked(p) and keys[p.name] not in known]
    takes_all = all(p.kind is p.VAR_KEYWORD for p in parameters)
    if variables and not takes_all and not any(each in keys.values() for each in variables):
        missing.append(variables[0])
    return keys, missing


def _canonical(parameter: str, columns: Batch) -> str:
    """Return the name here of a column or count that a parameter asks for."""
    if parameter in columns:
        return parameter
    name = re.sub(r"^new_|per_token_", "", parameter)
    name = re.sub(r"log_?p(rob)?s?$", "log_prob", name)
    return next((key for key, others in ALIASES.items() if name in others.split()), name)
