"""Relations that hold for every correct loss or estimator: pairs of outcomes that must be equal.

A relation yields (how the batch was changed, expected, actual) for a subject and a batch. Its
docstring says what must hold, and the likely cause if it does not. `RELATIONS` has the relations of
each kind in the order in which they are tried: extreme batches come last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from trainer.tools.check_loss.batches import (
    ZERO_OUTSIDE,
    Batch,
    has_token,
    make_batch,
    map_tokens,
    select_rows,
)
from trainer.tools.check_loss.subject import Measurement, Subject, counts_of
from verl_like.errors import ConfigError
from workers.losses.aggregate import Denominators, agg_loss

Pairs = Iterator[tuple[str, Measurement, Measurement]]
Relation = Callable[[Subject, Batch], Pairs]
STEPS = (1e-5, 1e-3)
"""Step sizes of finite differences: a large one may cross a kink, a small one is less exact."""


def no_side_effects(subject: Subject, batch: Batch) -> Pairs:
    """Check that a call does not change its arguments.

    Likely cause: an in-place operation (`x[...] =`, `x +=`, `x.mul_()`) on an argument; clone it.
    """
    arguments = Batch()

    def call(columns: Batch) -> Any:
        arguments.update(columns)
        return subject.call(columns)

    with suppress(ConfigError):  # autograd may fail after the change
        replace(subject, call=call).measure(batch)
    tensors = {name: column for name, column in batch.items() if isinstance(column, Tensor)}
    yield "after the call", tensors, arguments


def same_twice(subject: Subject, batch: Batch) -> Pairs:
    """Check that further calls give the same result.

    Likely cause: it draws random numbers (dropout, randperm), or keeps state between calls.
    """
    first = subject.measure(batch)
    for _ in range(5):
        yield "in another call", first, subject.measure(batch)


def finite_numbers(subject: Subject, batch: Batch) -> Pairs:
    """Check that ordinary batches with tokens and rows to compare give a finite result.

    Likely cause: the logarithm or root of zero or of a negative number, a division by zero, or an
    infinite constant.
    """
    mask = batch["response_mask"]
    if len(mask) > 1 and bool((mask.sum(1) > 1).all()):
        yield from _finite("on an ordinary batch", subject.measure(batch))


def prompt_tokens(subject: Subject, batch: Batch) -> Pairs:
    """Check that gradients and advantages are zero for prompts, observations and padding.

    Likely cause: the mask is not applied, is applied after a sum, or is inverted or shifted.
    """
    name = "advantages" if subject.kind == "estimator" else "gradient"
    column = subject.measure(batch)[name]
    is_inside = (batch["response_mask"] > 0) | column.isnan()  # other relations name NaN
    yield "outside the mask", {name: column.where(is_inside, 0)}, {name: column}


def numbers_outside(subject: Subject, batch: Batch) -> Pairs:
    """Check that numbers outside the mask have no effect.

    Likely cause: a sum, mean or maximum that runs over positions outside the mask.
    """
    yield from _same(subject, batch, _fill_outside(batch, 7.5), "with 7.5 outside the mask")


def padding_width(subject: Subject, batch: Batch) -> Pairs:
    """Check that more padding has no effect.

    Likely cause: a mean over all positions, a division by the mask's width, or a shift that wraps
    around (`roll`).
    """
    wide = map_tokens(batch, lambda column: pad(column, (0, 3)))
    yield from _same(subject, batch, wide, "with 3 more columns of padding")


def row_permutation(subject: Subject, batch: Batch) -> Pairs:
    """Check that the order of rows has no effect.

    Likely cause: rows are taken by position, such as groups by a stride instead of their index.
    """
    order = torch.randperm(len(batch["index"]), generator=torch.Generator().manual_seed(1))
    expected = {n: c[order] if c.ndim else c for n, c in subject.measure(batch).items()}
    yield f"with the rows {order.tolist()}", expected, subject.measure(select_rows(batch, order))


def micro_batch_cut(subject: Subject, batch: Batch) -> Pairs:
    """Check that a mini-batch gives the same result in micro-batches as in one pass.

    Likely cause: each micro-batch is divided by its own count; divide its sum by
    batch_num_tokens or global_batch_size, the counts of the whole mini-batch.
    """
    yield from _cut(subject, batch, is_parallel=False)


def data_parallel_split(subject: Subject, batch: Batch) -> Pairs:
    """Check that a mini-batch gives the same result on several ranks as on one rank.

    Likely cause: each rank's sum is divided by its own count, or scaled wrongly by dp_size.
    """
    yield from _cut(subject, batch, is_parallel=True)


def every_token(subject: Subject, batch: Batch) -> Pairs:
    """Check that a higher log-prob lowers the on-policy loss if all advantages are 1.

    For a value loss, check that a higher value lowers the loss if the returns are higher.

    Likely cause: a mask or column is shifted by a position, the sign is wrong, or the gradient is
    detached.
    """
    mask = batch["response_mask"]
    signs = subject.measure(_on_policy(subject, batch))["gradient"].sign().where(mask > 0, 0)
    yield "on-policy with an advantage of 1", {"gradient's sign": -mask}, {"gradient's sign": signs}


def wrong_way(subject: Subject, batch: Batch) -> Pairs:
    """Check that a token which moved the wrong way keeps its on-policy direction.

    A bad token (advantage -1) that is twice as likely is still pushed back, and a good token (1)
    that is half as likely is still pulled up. One token per row moves, so the ratio of a sequence
    stays small. A loss that ignores advantages has no wrong way.

    Likely cause: the loss of the clipped ratio replaces the other, or is the smaller of the two:
    take the larger, as in torch.maximum(-A * ratio, -A * clipped). If the loss drops such tokens
    by design, as dual clip with a bound below 2 does, skip the relation.
    """

    mask = batch["response_mask"]
    first = mask * (mask.cumsum(1) == 1)

    def signs(advantage: float, ratio: float) -> Tensor:
        changed = _on_policy(subject, batch)
        changed["advantages"] = advantage * changed["advantages"]
        changed["log_prob"] = changed["log_prob"] + math.log(ratio) * first
        gradient = subject.measure({**changed, "ref_log_prob": changed["log_prob"]})["gradient"]
        return gradient.sign().where(mask > 0, 0)

    bad, good = signs(-1.0, 1.0), signs(1.0, 1.0)
    if not torch.equal(bad, good):
        likelier = "where a token with an advantage of -1 is twice as likely as before"
        less_likely = "where a token with an advantage of 1 is half as likely as before"
        yield likelier, {"gradient's sign": bad}, {"gradient's sign": signs(-1.0, 2.0)}
        yield less_likely, {"gradient's sign": good}, {"gradient's sign": signs(1.0, 0.5)}


def holes_in_the_mask(subject: Subject, batch: Batch) -> Pairs:
    """Check that a token outside the mask in the middle of a row has no effect.

    Likely cause: a recursion or sum includes such a token, for example of a tool's answer.
    """
    order = (batch["response_mask"] == 0).long().argsort(dim=1, stable=True)
    packed = map_tokens(batch, lambda column: column.gather(1, order))
    yield from _same(subject, batch, packed, "with a row's tokens next to each other")


def declared_aggregation(subject: Subject, batch: Batch) -> Pairs:
    """Check that tokens of long and short rows have the weights of the declared loss_agg_mode.

    Likely cause: another aggregation is computed: one mean over all tokens, or means over rows.
    """

    def gradients(batch: Batch) -> tuple[Tensor, Tensor]:
        counts: Any = {key: counts_of(batch)[key] for key in Denominators.__annotations__}
        losses, mask = batch[subject.variable].clone().requires_grad_(), batch["response_mask"]
        total = agg_loss(losses, mask, subject.mode or "", **counts)
        gradient = subject.measure(_on_policy(subject, batch))["gradient"]
        return gradient, torch.autograd.grad(total, losses)[0]

    if subject.mode is not None and bool(batch["response_mask"].any(1).all()):
        (unit, unit_weight), (gradient, weights) = gradients(make_batch("1")), gradients(batch)
        expected = {"gradient": unit / unit_weight * weights}
        yield f"with the weights of {subject.mode}", expected, {"gradient": gradient}


class CallRecorder(TorchFunctionMode):
    """Records dtypes, and constants: tensors from `detach` or `no_grad`.

    If given, `constants` from an earlier call replace the tensors of this call. The forward of an
    `autograd.Function` also runs without gradients, but its results are not constants.
    """

    def __init__(self, constants: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.constants, self.remaining, self.has_gradient = list[Tensor](), iter(constants), True
        self.dtypes = set[torch.dtype]()

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function is torch._C._set_grad_enabled:
            self.has_gradient = args[0]
        if isinstance(result, Tensor):
            self.dtypes.add(result.dtype)
            if function is Tensor.detach or not self.has_gradient:
                result = next(self.remaining, result).clone()
                self.constants.append(result.clone())
        return result


def finite_differences(subject: Subject, batch: Batch) -> Pairs:
    """Check the gradient against finite differences, with detached values constant or recomputed.

    Likely cause: a backward written by hand, or numbers that are computed from .data or .item().
    """
    base = batch[subject.variable]
    direction = torch.randn(base.shape, generator=torch.Generator().manual_seed(2)).double()

    def slope(step: float, constants: Sequence[Tensor]) -> Tensor:
        losses = []
        for shifted in (base + step * direction, base - step * direction):
            with CallRecorder(constants):
                losses.append(subject.measure({**batch, subject.variable: shifted})["loss"])
        return (losses[0] - losses[1]) / (2 * step)

    with CallRecorder() as record:
        actual = (subject.measure(batch)["gradient"] * direction).sum()
    slopes = [slope(step, known) for step in STEPS for known in (list[Tensor](), record.constants)]
    closest = min(slopes, key=lambda value: float((value - actual).abs()))
    yield "against the difference of losses", {"slope": closest}, {"slope": actual}


def better_side(subject: Subject, batch: Batch) -> Pairs:
    """Check that a higher log-prob of the better response lowers the loss.

    Likely cause: the chosen and the rejected response are swapped, or the sign is wrong.
    """
    even = dict.fromkeys(("log_probs", "ref_log_probs"), -torch.ones_like(batch["log_probs"]))
    gradient = subject.measure({**batch, **even, "gap": 0 * batch["gap"]})["gradient"]
    if gradient.ndim > 1:
        gradient = gradient[:, 0] - gradient[:, 1]
    better = 2 * batch["desirable"] - 1 if "desirable" in subject.reads else gradient**0
    signs = {"gradient's sign": gradient.sign()}
    yield "where no response is preferred", {"gradient's sign": -better}, signs


def extreme_ratios(subject: Subject, batch: Batch) -> Pairs:
    """Check that loss and gradient are finite in float32 if a log-ratio is 100 or -100.

    Likely cause: an exponential, which overflows above 88; clamp the log-ratio before it.
    """
    single = {n: c.float() if c.dtype == torch.float64 else c for n, c in batch.items()}
    side = torch.tensor([1.0, 0.0]) if subject.variable == "log_probs" else 1.0
    for far in (100.0, -100.0):  # a log-prob stays below zero
        shifted = {**single, subject.variable: single[subject.variable] + far * side}
        log_probs = {n: c - max(far, 0) for n, c in shifted.items() if "log_prob" in n}
        yield from _finite(f"with log-ratios of {far:g}", subject.measure({**shifted, **log_probs}))


def nan_outside(subject: Subject, batch: Batch) -> Pairs:
    """Check that NaN outside the mask has no effect.

    Likely cause: a product with the mask, because 0 * NaN is NaN; use torch.where or masked_fill.
    """
    yield from _same(subject, batch, _fill_outside(batch, torch.nan), "with NaN outside the mask")


def all_masked(subject: Subject, batch: Batch) -> Pairs:
    """Check that a mini-batch without a token gives zero.

    Likely cause: a division by the number of tokens or rows, which is 0; clamp it to at least 1.
    """
    names = ("response_mask", "advantages", *ZERO_OUTSIDE)
    actual = subject.measure({**batch, **{name: torch.zeros_like(batch[name]) for name in names}})
    zero = {name: torch.zeros_like(column) for name, column in actual.items()}
    yield "with no token inside the mask", zero, actual


def group_size_one(subject: Subject, batch: Batch) -> Pairs:
    """Check that a group of one row, and a group of equal rewards, give finite advantages.

    Likely cause: the standard deviation of one number is NaN, and of equal numbers 0.
    """
    alone = {"index": [f"prompt {row}" for row in range(len(batch["index"]))]}
    equal = {name: 0 * batch[name] for name in ("named_rewards", "token_level_rewards")}
    if bool(batch["response_mask"].any(1).all()):
        yield from _finite("with each row alone", subject.measure({**batch, **alone}))
        yield from _finite("with each row like its group", subject.measure({**batch, **equal}))


def reward_scale_and_shift(subject: Subject, batch: Batch) -> Pairs:
    """Check that scaling all rewards, or shifting a group's rewards, only scales the advantages.

    This applies to estimators that compare the rewards of groups, if groups have two or more rows.

    Likely cause: the baseline is not the mean of the row's own group, or rewards are clipped, or
    divided by a wrong standard deviation.
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


def _finite(change: str, actual: Measurement) -> Pairs:
    yield change, {name: column.nan_to_num(0, 0, 0) for name, column in actual.items()}, actual


def _fill_outside(batch: Batch, number: float) -> Batch:
    outside, others = batch["response_mask"] == 0, ("response_mask", *ZERO_OUTSIDE)
    return map_tokens(batch, lambda column: column.masked_fill(outside, number), others)


def _same(subject: Subject, batch: Batch, changed: Batch, change: str) -> Pairs:
    yield change, inside(subject, batch), inside(subject, changed)


def inside(subject: Subject, batch: Batch) -> Measurement:
    """Return the outcome, with only the tokens inside the mask, flattened."""
    mask = batch["response_mask"].bool()
    outcome = subject.measure(batch).items()
    return {
        name: column[mask] if column.shape == mask.shape else column for name, column in outcome
    }


def _cut(subject: Subject, batch: Batch, is_parallel: bool) -> Pairs:
    """Compare one pass with micro-batches of one row, of half of the rows, and of all but one."""
    rows, expected = torch.arange(len(batch["index"])), subject.measure(batch)
    for size in {1, len(rows) // 2, len(rows) - 1} - {0, len(rows)}:
        if subject.equal_cuts and len(rows) % size:
            continue
        groups = rows.split(size)
        parts = [select_rows(batch, group) for group in groups]
        actual = subject.measure(*parts, ranks=len(parts) if is_parallel else 1)
        is_nan = any(bool(column.isnan().any()) for column in actual.values())
        if all(map(has_token, parts)) or not is_nan:  # `all_masked` reports a division by 0
            yield f"with the rows {[group.tolist() for group in groups]}", expected, actual


def _on_policy(subject: Subject, batch: Batch) -> Batch:
    """Return an on-policy batch in which every response token should get a gradient of one sign."""
    if subject.kind == "value":
        return {**batch, "vpreds": batch["values"], "returns": batch["values"] + 0.5}
    mask = batch["response_mask"]
    changed = {"advantages": mask.double(), "chosen_tokens": mask < 0}
    changed |= dict.fromkeys(("old_log_prob", "log_prob"), mask.double() - 2)
    return {**batch, **changed, "ref_log_prob": changed["log_prob"] + 0.5}


FIRST = [no_side_effects, same_twice, finite_numbers]
MASKED = [prompt_tokens, numbers_outside, padding_width]
CUT = [row_permutation, micro_batch_cut, data_parallel_split]
TOKENS = [every_token, holes_in_the_mask, declared_aggregation, all_masked, finite_differences]
GROUPED = [row_permutation, holes_in_the_mask, group_size_one, reward_scale_and_shift]
RELATIONS: Mapping[str, Sequence[Relation]] = {
    "policy": [*FIRST, *MASKED, *CUT, *TOKENS, wrong_way, extreme_ratios, nan_outside],
    "value": [*FIRST, *MASKED, *CUT, *TOKENS, nan_outside],
    "preference": [*FIRST, *CUT, better_side, finite_differences, extreme_ratios],
    "estimator": [*FIRST, *MASKED, *GROUPED, all_masked],
}
"""Kind -> its relations, in the order in which they are tried."""
NAMES = list(dict.fromkeys(relation.__name__ for named in RELATIONS.values() for relation in named))
TOLERANCES = {"finite_differences": 1e-3, "reward_scale_and_shift": 1e-2}
"""Relation -> its tolerance, if it is not 1e-6."""
