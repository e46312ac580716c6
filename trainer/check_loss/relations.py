"""Relations that hold for every correct loss or estimator: pairs of outcomes that must be equal.

A relation yields (how the batch was changed, expected, actual) for a subject and a batch. Its
docstring says what must hold, and the likely cause if it does not. The relations are tried in this
order, so extreme batches come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.check_loss.batches import (
    ESTIMATOR,
    POLICY,
    PREFERENCE,
    VALUE,
    ZERO_OUTSIDE,
    Batch,
    make_batch,
    map_tokens,
    take,
)
from trainer.check_loss.subject import Outcome, Subject
from workers.losses.aggregate import Denominators, agg_loss

Pairs = Iterator[tuple[str, Outcome, Outcome]]
Compare = Callable[[Subject, Batch], Pairs]
LOSSES = (POLICY, VALUE)
WITH_MASK = (*LOSSES, ESTIMATOR)
KINDS = (*WITH_MASK, PREFERENCE)
STEP = 1e-5


class Relation(NamedTuple):
    """A relation between outcomes."""

    compare: Compare
    kinds: Sequence[str] = ()
    every_mode: bool = False
    """Whether it is tried with every aggregation."""
    tolerance: float = 1e-6


RELATIONS: dict[str, Relation] = {}


def relation(*kinds: str, **details: Any) -> Callable[[Compare], Compare]:
    """Enter a relation for these kinds, by its function's name."""

    def enter(compare: Compare) -> Compare:
        RELATIONS[compare.__name__] = Relation(compare, kinds, **details)
        return compare

    return enter


@relation(*KINDS)
def no_side_effects(subject: Subject, batch: Batch) -> Pairs:
    """The arguments are unchanged after a call.

    Likely cause: an operation in place (`x[...] =`, `x +=`, `x.mul_()`) on an argument; clone it.
    """
    tensors = {name: column for name, column in batch.items() if isinstance(column, Tensor)}
    given = {name: column.clone() for name, column in tensors.items()}
    subject.measure({**batch, **given})
    yield "after the call", tensors, given


@relation(*KINDS)
def same_twice(subject: Subject, batch: Batch) -> Pairs:
    """Another call gives the same.

    Likely cause: it draws random numbers (dropout, randperm), or keeps something between calls.
    """
    first = subject.measure(batch)
    for _ in range(5):
        yield "in another call", first, subject.measure(batch)


@relation(*WITH_MASK)
def prompt_tokens(subject: Subject, batch: Batch) -> Pairs:
    """Gradients and advantages are zero outside the mask: of prompts, observations and padding.

    Likely cause: the mask is not applied, or after a sum, or it is inverted or shifted.
    """
    name = "advantages" if subject.kind == ESTIMATOR else "gradient"
    actual = {name: subject.measure(batch)[name]}
    yield "outside the mask", {name: actual[name].where(batch["response_mask"] > 0, 0)}, actual


@relation(*WITH_MASK)
def numbers_outside(subject: Subject, batch: Batch) -> Pairs:
    """Other numbers outside the mask change nothing.

    Likely cause: a sum, mean or maximum that runs over positions outside the mask.
    """
    yield from _same(subject, batch, _fill_outside(batch, 7.5), "with 7.5 outside the mask")


@relation(*LOSSES)
def every_token(subject: Subject, batch: Batch) -> Pairs:
    """Every token of the response has a gradient, on-policy and with an advantage of 1.

    Likely cause: a mask or column is shifted by a position, or the gradient is cut on the way.
    """
    inside = batch["response_mask"].bool()
    nonzero = inside & (subject.measure(_on_policy(subject, batch))["gradient"] != 0)
    yield "where 1 says that a token has one", {"gradient": inside}, {"gradient": nonzero}


@relation(*WITH_MASK, every_mode=True)
def padding_width(subject: Subject, batch: Batch) -> Pairs:
    """More padding changes nothing.

    Likely cause: a mean over all positions, or a division by the mask's width.
    """
    wide = map_tokens(batch, lambda column: pad(column, (0, 3)))
    yield from _same(subject, batch, wide, "with 3 more columns of padding")


@relation(*WITH_MASK)
def holes_in_the_mask(subject: Subject, batch: Batch) -> Pairs:
    """A token outside the mask in the middle of a row is as if it were not there.

    Likely cause: a recursion or sum takes a step at such a token, a tool's answer for example.
    """
    order = (batch["response_mask"] == 0).long().argsort(dim=1, stable=True)
    packed = map_tokens(batch, lambda column: column.gather(1, order))
    yield from _same(subject, batch, packed, "with a row's tokens next to each other")


@relation(*KINDS)
def row_permutation(subject: Subject, batch: Batch) -> Pairs:
    """The order of rows changes nothing.

    Likely cause: rows are taken by position, such as groups by a stride instead of their index.
    """
    order = torch.randperm(num_rows(batch), generator=torch.Generator().manual_seed(1))
    yield from _regrouped(subject, batch, [order.tolist()])


@relation(POLICY, VALUE, PREFERENCE, every_mode=True)
def micro_batch_cut(subject: Subject, batch: Batch) -> Pairs:
    """A mini-batch gives the same in micro-batches as at once.

    Likely cause: each micro-batch is divided by its own count; divide its sum by
    batch_num_tokens or global_batch_size, the counts of the whole mini-batch.
    """
    for groups in _groups(subject, batch):
        yield from _regrouped(subject, batch, groups)


@relation(POLICY, VALUE, PREFERENCE, every_mode=True)
def data_parallel_split(subject: Subject, batch: Batch) -> Pairs:
    """A mini-batch gives the same on several ranks as on one.

    Likely cause: each rank is divided by its own count, or scaled by dp_size the wrong way.
    """
    for groups in _groups(subject, batch):
        yield from _regrouped(subject, batch, groups, ranks=len(groups))


@relation(*LOSSES, every_mode=True)
def declared_aggregation(subject: Subject, batch: Batch) -> Pairs:
    """Tokens of long and short rows have the weights that the declared loss_agg_mode gives them.

    Likely cause: another aggregation is computed: one mean over all tokens, or means over rows.
    """

    def aggregate(given: Batch) -> Tensor:
        counts: Any = {key: given[key] for key in Denominators.__annotations__}
        mode = subject.mode or ""
        return agg_loss(given[subject.variable], given["response_mask"], mode, **counts)

    if subject.mode is not None and bool(batch["response_mask"].any(1).all()):
        unit, batch = (_on_policy(subject, b) for b in (make_batch(subject.kind, "1"), batch))
        weights = replace(subject, call=aggregate)
        slope = subject.measure(unit)["gradient"] / weights.measure(unit)["gradient"]
        expected = {"gradient": slope * weights.measure(batch)["gradient"]}
        yield f"as {subject.mode} weighs it", expected, subject.measure(batch)


@relation(POLICY, VALUE, PREFERENCE, tolerance=1e-4)
def finite_differences(subject: Subject, batch: Batch) -> Pairs:
    """The gradient is the slope of the loss, where detached values may be constant or not.

    Likely cause: a backward written by hand, or numbers computed under no_grad or from .data.
    """
    base, detach, constants = batch[subject.variable], Tensor.detach, list[Tensor]()
    direction = torch.randn(base.shape, generator=torch.Generator().manual_seed(2)).double()
    direction *= batch.get("response_mask", torch.ones_like(base))

    def record(tensor: Tensor) -> Tensor:
        constants.append(detach(tensor))
        return constants[-1]

    def loss_at(step: float, substitute: Callable[[Tensor], Tensor]) -> Tensor:
        with patch.object(Tensor, "detach", substitute):
            return subject.measure({**batch, subject.variable: base + step * direction})["loss"]

    def constant_loss_at(step: float) -> Tensor:
        remaining = iter(constants)
        return loss_at(step, lambda _: next(remaining))

    actual = (subject.measure(batch)["gradient"] * direction).sum()
    loss_at(0.0, record)
    free = loss_at(STEP, detach) - loss_at(-STEP, detach)
    slopes = torch.stack([free, constant_loss_at(STEP) - constant_loss_at(-STEP)]) / (2 * STEP)
    slope = slopes[(slopes - actual).abs().argmin()]
    yield "against the difference of losses", {"slope": slope}, {"slope": actual}


@relation(POLICY, PREFERENCE)
def extreme_ratios(subject: Subject, batch: Batch) -> Pairs:
    """Loss and gradient are finite in float32 where a log-ratio is 100 or -100.

    Likely cause: an exponential, which overflows above 88; clamp the log-ratio before it.
    """
    single = {n: c.float() if c.dtype == torch.float64 else c for n, c in batch.items()}
    side = torch.tensor([1.0, 0.0]) if subject.variable == "log_probs" else 1.0
    for far in (100.0, -100.0):  # a log-prob stays below zero
        moved = {**single, subject.variable: single[subject.variable] + far * side}
        log_probs = {n: c - max(far, 0) for n, c in moved.items() if "log_prob" in n}
        yield from _finite(f"with log-ratios of {far:g}", subject.measure({**moved, **log_probs}))


@relation(*LOSSES)
def nan_outside(subject: Subject, batch: Batch) -> Pairs:
    """NaN outside the mask changes nothing.

    Likely cause: a product with the mask, as 0 * NaN is NaN; use torch.where or masked_fill.
    """
    yield from _same(subject, batch, _fill_outside(batch, torch.nan), "with NaN outside the mask")


@relation(*WITH_MASK, every_mode=True)
def all_masked(subject: Subject, batch: Batch) -> Pairs:
    """A mini-batch without a token gives zero.

    Likely cause: a division by the number of tokens or rows, which is 0; clamp it to at least 1.
    """
    names = ("response_mask", "advantages", *ZERO_OUTSIDE)
    zeroed = {name: torch.zeros_like(batch[name]) for name in names}
    actual = subject.measure({**batch, **zeroed})
    yield (
        "with no token inside the mask",
        {n: 0 * c.nan_to_num() for n, c in actual.items()},
        actual,
    )


@relation(ESTIMATOR)
def group_size_one(subject: Subject, batch: Batch) -> Pairs:
    """A row that is alone in its group, and a group of equal rewards, give finite advantages.

    Likely cause: the standard deviation of one number is NaN, and that of equal ones is 0.
    """
    alone = {"index": [f"prompt {row}" for row in range(num_rows(batch))]}
    equal = {name: 0 * batch[name] for name in ("named_rewards", "token_level_rewards")}
    yield from _finite("with each row alone", subject.measure({**batch, **alone}))
    yield from _finite("with each row like its group", subject.measure({**batch, **equal}))


@relation(ESTIMATOR, tolerance=1e-2)
def reward_scale_and_shift(subject: Subject, batch: Batch) -> Pairs:
    """A factor on all rewards, or a constant on a group's rewards, only scales the advantages.

    Estimators with groups of two or more rows promise it.

    Likely cause: the baseline is not the mean of the row's own group, or rewards are clipped, or
    divided by a wrong spread.
    """
    uids, rewards = list(batch["index"]), batch["token_level_rewards"]
    shift = torch.tensor([[3.0 * (1 + uids.index(uid))] for uid in uids]) * batch["step_ends"]
    is_promised = {"index", "token_level_rewards"} <= {*subject.reads}
    if is_promised and min(map(uids.count, uids)) > 1 and bool(batch["response_mask"].any(1).all()):
        expected = subject.measure(batch)["advantages"]
        for change, changed in {"8 times": rewards * 8, "shifted": rewards + shift}.items():
            actual = subject.measure({**batch, "token_level_rewards": changed})["advantages"]
            scaled = expected * actual.abs().max() / expected.abs().max().clamp(min=1e-12)
            yield f"with rewards {change}", {"advantages": scaled}, {"advantages": actual}


def _finite(change: str, actual: Outcome) -> Pairs:
    yield change, {name: column.nan_to_num(0, 0, 0) for name, column in actual.items()}, actual


def _fill_outside(batch: Batch, number: float) -> Batch:
    outside, others = batch["response_mask"] == 0, ("response_mask", *ZERO_OUTSIDE)
    return map_tokens(batch, lambda column: column.masked_fill(outside, number), others)


def _same(subject: Subject, batch: Batch, changed: Batch, change: str) -> Pairs:
    yield change, inside(subject, batch), inside(subject, changed)


def inside(subject: Subject, batch: Batch) -> Outcome:
    """Return the outcome of the tokens inside the mask, row by row."""
    mask = batch["response_mask"].bool() if "response_mask" in batch else ...
    outcome = subject.measure(batch).items()
    return {name: column[mask] if column.ndim else column for name, column in outcome}


def num_rows(batch: Batch) -> int:
    """Return the number of rows."""
    return len(next(iter(batch.values())))


def _groups(subject: Subject, batch: Batch) -> Iterator[list[list[int]]]:
    """Yield the rows in groups of one, of half of the rows, and of all rows but one."""
    rows = torch.arange(num_rows(batch))
    for size in {1, len(rows) // 2, len(rows) - 1} - {0, len(rows)}:
        if len(rows) % size == 0 or not subject.equal_cuts:
            yield [group.tolist() for group in rows.split(size)]


def _regrouped(subject: Subject, batch: Batch, groups: list[list[int]], ranks: int = 1) -> Pairs:
    """Compare the outcome at once with the outcome in these groups of rows."""
    order = [row for rows in groups for row in rows]
    whole = subject.measure(batch).items()
    expected = {name: column[order] if column.ndim else column for name, column in whole}
    actual = subject.measure(*(take(batch, rows) for rows in groups), ranks=ranks)
    yield f"with the rows {groups}", expected, actual


def _on_policy(subject: Subject, batch: Batch) -> Batch:
    """Return the batch with the same force on every token of the response."""
    if subject.kind == VALUE:
        return {**batch, "vpreds": batch["values"], "returns": batch["values"] + 0.5}
    mask, log_probs = batch["response_mask"], ("old_log_prob", "log_prob", "ref_log_prob")
    changed = {"advantages": mask.double(), "chosen_tokens": mask < 0}
    return {**batch, **changed, **dict.fromkeys(log_probs, mask.double() - 2)}
