"""What holds for every correct loss or estimator: pairs of outcomes that must be equal.

A relation yields (what was done, expected, found) for a subject and a batch. Its docstring says
what must hold, and what usually breaks it. They are tried in this order,
and extreme batches come last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.check_loss import batches
from trainer.check_loss.batches import ESTIMATOR, POLICY, PREFERENCE, REWARDS, VALUE, Batch
from trainer.check_loss.subject import LOSS_SCALE_FACTOR, Outcome, Subject
from workers.losses.aggregate import agg_loss

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

    @property
    def cause(self) -> str:
        """What usually breaks it."""
        words = inspect.getdoc(self.compare) or ""
        return words.partition("Likely cause: ")[2].replace("\n", " ")


RELATIONS: dict[str, Relation] = {}


def relation(*kinds: str, **details: Any) -> Callable[[Compare], Compare]:
    """Enter a relation for these kinds, by its function's name."""

    def enter(compare: Compare) -> Compare:
        RELATIONS[compare.__name__] = Relation(compare, kinds, **details)
        return compare

    return enter


@relation(*KINDS)
def no_side_effects(subject: Subject, batch: Batch) -> Pairs:
    """The arguments are what they were.

    Likely cause: an operation in place (`x[...] =`, `x +=`, `x.mul_()`) on an argument; clone it.
    """
    tensors = {name: column for name, column in batch.items() if isinstance(column, Tensor)}
    given = {**batch, **{name: column.clone() for name, column in tensors.items()}}
    if subject.kind == ESTIMATOR:
        subject.columns(given)
    else:
        given[subject.variable] = given[subject.variable].requires_grad_() * 1
        subject.loss(subject.with_choice(given), subject.facts([batch]))
    yield "after the call", tensors, {name: given[name].detach() for name in tensors}


@relation(*KINDS)
def same_twice(subject: Subject, batch: Batch) -> Pairs:
    """A second call gives the same.

    Likely cause: it draws random numbers (dropout, randperm), or keeps something between calls.
    """
    yield "in a second call", subject.at_once(batch), subject.at_once(batch)


@relation(*WITH_MASK)
def prompt_tokens(subject: Subject, batch: Batch) -> Pairs:
    """Gradients and advantages are zero outside the mask: of prompts, observations and padding.

    Likely cause: the mask is not applied, or after a sum, or it is inverted or shifted.
    """
    found = subject.at_once(batch)
    outside = batch["response_mask"] == 0
    name = "advantages" if subject.kind == ESTIMATOR else "gradient"
    yield "outside the mask", {name: found[name].masked_fill(outside, 0)}, found


@relation(*WITH_MASK)
def numbers_outside(subject: Subject, batch: Batch) -> Pairs:
    """Other numbers outside the mask change nothing.

    Likely cause: a sum, mean or maximum that runs over positions outside the mask.
    """
    yield "with 7.5 outside the mask", *_both(subject, batch, _fill_outside(batch, 7.5))


@relation(*LOSSES)
def every_token(subject: Subject, batch: Batch) -> Pairs:
    """Every token of the response has a gradient, on-policy and with an advantage of 1.

    Likely cause: a mask or column is shifted by a position, or the gradient is cut on the way.
    """
    gradient = subject.at_once(_on_policy(subject, batch))["gradient"]
    inside = batch["response_mask"].bool()
    nonzero = (gradient != 0).where(inside, 0)
    yield "where 1 says that a token has one", {"gradient": inside}, {"gradient": nonzero}


@relation(*WITH_MASK, every_mode=True)
def padding_width(subject: Subject, batch: Batch) -> Pairs:
    """More padding changes nothing.

    Likely cause: a mean over all positions, or a division by the mask's width.
    """
    wide = batches.map_tokens(batch, lambda column: pad(column, (0, 3)))
    yield "with 3 more columns of padding", *_both(subject, batch, wide)


@relation(*WITH_MASK)
def holes_in_the_mask(subject: Subject, batch: Batch) -> Pairs:
    """A token outside the mask in the middle of a row is as if it were not there.

    Likely cause: a recursion or sum takes a step at such a token, a tool's answer for example.
    """
    order = (batch["response_mask"] == 0).long().argsort(dim=1, stable=True)
    packed = batches.map_tokens(batch, lambda column: column.gather(1, order))
    yield "with a row's tokens next to each other", *_both(subject, batch, packed)


@relation(*KINDS)
def row_permutation(subject: Subject, batch: Batch) -> Pairs:
    """The order of rows changes nothing.

    Likely cause: rows are taken by position, such as groups by a stride instead of their index.
    """
    batch, rows = subject.with_choice(batch), batches.num_rows(batch)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist()
    found = subject.measure([[batches.take(batch, order)]])
    whole = subject.measure([[batch]])
    expected = {name: column[order] if column.ndim else column for name, column in whole.items()}
    yield f"with rows in the order {order}", expected, found


@relation(POLICY, VALUE, PREFERENCE, every_mode=True)
def micro_batch_cut(subject: Subject, batch: Batch) -> Pairs:
    """A mini-batch gives the same in micro-batches as at once.

    Likely cause: each micro-batch is divided by its own count; divide its sum by
    batch_num_tokens or global_batch_size, the counts of the whole mini-batch.
    """
    for rows, whole, parts in _cuts(subject, batch):
        yield f"in micro-batches of {rows} rows", whole, subject.measure([parts])


@relation(*LOSSES, every_mode=True)
def data_parallel_split(subject: Subject, batch: Batch) -> Pairs:
    """A mini-batch gives the same on several ranks as on one.

    Likely cause: each rank is divided by its own count, or scaled by dp_size the wrong way.
    """
    for rows, whole, parts in _cuts(subject, batch):
        yield f"on ranks with {rows} rows", whole, subject.measure([[part] for part in parts])


@relation(*LOSSES, every_mode=True)
def declared_aggregation(subject: Subject, batch: Batch) -> Pairs:
    """Tokens of long and short rows have the weights that the declared loss_agg_mode gives them.

    Likely cause: another aggregation is computed: one mean over all tokens, or means over rows.
    """
    unit = _on_policy(subject, batches.make_batch(subject.kind, "1"))
    batch = _on_policy(subject, batch)
    if subject.mode is not None and bool(batch["response_mask"].any(1).all()):
        slope = subject.at_once(unit)["gradient"] / _weights(unit["response_mask"], subject.mode)
        expected = slope * _weights(batch["response_mask"], subject.mode)
        yield f"as {subject.mode} weighs it", {"gradient": expected}, subject.at_once(batch)


@relation(POLICY, VALUE, PREFERENCE, tolerance=1e-4)
def finite_differences(subject: Subject, batch: Batch) -> Pairs:
    """The gradient is the slope of the loss, where what is detached may be held or not.

    Likely cause: a backward written by hand, or numbers computed under no_grad or from .data.
    """
    batch, detach, detached = subject.with_choice(batch), Tensor.detach, list[Tensor]()
    place = batch[subject.variable]
    inside = batch.get("response_mask", torch.ones_like(place))
    way = torch.randn(place.shape, generator=torch.Generator().manual_seed(2)).double() * inside

    def record(tensor: Tensor) -> Tensor:
        detached.append(detach(tensor))
        return detached[-1]

    def loss_at(step: float, substitute: Callable[[Tensor], Tensor]) -> Tensor:
        moved = {**batch, subject.variable: (place + step * way).requires_grad_()}
        with patch.object(Tensor, "detach", substitute):
            return detach(subject.loss(moved, subject.facts([batch])).sum())

    def held_at(step: float) -> Tensor:
        held = iter(detached)
        return loss_at(step, lambda _: next(held))

    loss_at(0.0, record)
    found = (subject.measure([[batch]])["gradient"] * way).sum()
    moved = loss_at(STEP, detach) - loss_at(-STEP, detach), held_at(STEP) - held_at(-STEP)
    slopes = torch.stack(moved) / (2 * STEP)
    expected = slopes[(slopes - found).abs().argmin()]
    yield "against the difference of losses", {"slope": expected}, {"slope": found}


@relation(POLICY, PREFERENCE)
def extreme_ratios(subject: Subject, batch: Batch) -> Pairs:
    """Loss and gradient are finite in float32 where a log-ratio is 100 or -100.

    Likely cause: an exponential, which overflows above 88; clamp the log-ratio before it.
    """
    single = {n: c.float() if c.dtype == torch.float64 else c for n, c in batch.items()}
    for far in (100.0, -100.0):
        moved = {**single, subject.variable: single[subject.variable] + far}
        yield from _finite(f"with log-ratios of {far:g}", subject.at_once(moved))


@relation(*LOSSES)
def nan_outside(subject: Subject, batch: Batch) -> Pairs:
    """NaN outside the mask changes nothing.

    Likely cause: a product with the mask, as 0 * NaN is NaN; use torch.where or masked_fill.
    """
    yield "with NaN outside the mask", *_both(subject, batch, _fill_outside(batch, torch.nan))


@relation(*WITH_MASK, every_mode=True)
def all_masked(subject: Subject, batch: Batch) -> Pairs:
    """A mini-batch without a token gives zero.

    Likely cause: a division by the number of tokens or rows, which is 0; clamp it to at least 1.
    """
    zeroed = ("response_mask", "advantages", *REWARDS)
    empty = {**batch, **{name: torch.zeros_like(batch[name]) for name in zeroed}}
    found = subject.at_once(empty)
    yield "with no token inside the mask", {n: torch.zeros_like(c) for n, c in found.items()}, found


@relation(ESTIMATOR)
def group_size_one(subject: Subject, batch: Batch) -> Pairs:
    """A row that is alone in its group, and a group of equal rewards, give finite advantages.

    Likely cause: the standard deviation of one number is NaN, and that of equal ones is 0.
    """
    alone = [f"prompt {row}" for row in range(batches.num_rows(batch))]
    equal = {name: 0 * batch[name] for name in ("named_rewards", "token_level_rewards")}
    for what, changed in {"alone": {"index": alone}, "like its group": equal}.items():
        yield from _finite(f"with each row {what}", subject.at_once({**batch, **changed}))


@relation(ESTIMATOR, tolerance=1e-2)
def reward_shift(subject: Subject, batch: Batch) -> Pairs:
    """A constant that is added to a group's rewards changes nothing but the scale.

    Likely cause: the baseline is not the mean of the row's own group.
    """
    uids = list(batch["index"])
    shift = torch.tensor([[3.0 * (1 + uids.index(uid))] for uid in uids])
    yield from _rewards(subject, batch, batch["token_level_rewards"] + shift * batch["step_ends"])


@relation(ESTIMATOR, tolerance=1e-2)
def reward_scale(subject: Subject, batch: Batch) -> Pairs:
    """A factor on all rewards is a factor on all advantages.

    Likely cause: a constant is added to rewards, or they are clipped or divided by a wrong spread.
    """
    yield from _rewards(subject, batch, batch["token_level_rewards"] * 8)


def _rewards(subject: Subject, batch: Batch, rewards: Tensor) -> Pairs:
    """Compare advantages up to a factor, which estimators with groups of two or more promise."""
    uids = list(batch["index"])
    is_promised = {"index", "token_level_rewards"} <= {*subject.reads}
    if is_promised and min(map(uids.count, uids)) > 1 and bool(batch["response_mask"].any(1).all()):
        changed = subject.at_once({**batch, "token_level_rewards": rewards})
        expected, found = subject.at_once(batch)["advantages"], changed["advantages"]
        factor = found.abs().max() / expected.abs().max().clamp(min=1e-12)
        yield "up to a factor", {"advantages": expected * factor}, {"advantages": found}


def _finite(done: str, found: Outcome) -> Pairs:
    yield done, {name: column.nan_to_num(0, 0, 0) for name, column in found.items()}, found


def _fill_outside(batch: Batch, number: float) -> Batch:
    outside, but = batch["response_mask"] == 0, ("response_mask", *REWARDS)
    return batches.map_tokens(batch, lambda column: column.masked_fill(outside, number), but)


def _both(subject: Subject, batch: Batch, other: Batch) -> tuple[Outcome, Outcome]:
    return inside(subject, batch), inside(subject, other)


def inside(subject: Subject, batch: Batch) -> Outcome:
    """Return the outcome with the tokens inside the mask alone, row by row."""
    mask, found = batch["response_mask"].bool(), subject.at_once(batch)
    return {name: column[mask] if column.ndim else column for name, column in found.items()}


def _cuts(subject: Subject, batch: Batch) -> Iterator[tuple[list[int], Outcome, list[Batch]]]:
    """Yield the outcome at once, with parts of one row, of half of the rows, and uneven ones."""
    rows, batch = batches.num_rows(batch), subject.with_choice(batch)
    for sizes in ([1] * rows, [rows // 2] * 2, [rows - 1, 1]):
        is_equal = len({*sizes}) == 1 or not subject.equal_cuts
        if len(sizes) > 1 and sum(sizes) == rows and min(sizes) > 0 and is_equal:
            starts = [sum(sizes[:part]) for part in range(len(sizes))]
            ranges = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
            yield sizes, subject.measure([[batch]]), [batches.take(batch, each) for each in ranges]


def _on_policy(subject: Subject, batch: Batch) -> Batch:
    """Return the batch with the same force on every token of the response."""
    if subject.kind == VALUE:
        return {**batch, "vpreds": batch["values"], "returns": batch["values"] + 0.5}
    same = {name: batch["old_log_prob"] for name in ("log_prob", "ref_log_prob")}
    return {**batch, **same, "advantages": batch["response_mask"].double()}


def _weights(mask: Tensor, mode: str) -> Tensor:
    """Return what an aggregation multiplies the loss of each token by."""
    losses = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    total = agg_loss(losses, mask, mode, loss_scale_factor=LOSS_SCALE_FACTOR)
    return torch.autograd.grad(total, losses)[0]
