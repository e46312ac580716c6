"""Relations between the numbers of two sides that name a cause without a formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.tools.bisect.walk import Rows, Step, same_rows

Relation = tuple[str, str]
"""A name, and a sentence about B."""


def of_arrays(x: np.ndarray, y: np.ndarray, a: Step, b: Step) -> Iterator[Relation]:
    """Yield how B's numbers follow from A's, for numbers of rows or tokens."""
    if x.shape != y.shape:
        return
    for first, other, name in ((x, y, "B"), (y, x, "A")):
        for kind, digits in (("bfloat16", bfloat16), ("float16", float16)):
            if close(digits(first), other, rtol=1e-7) and not close(first, other, rtol=1e-7):
                yield "precision", f"{name} has the other's numbers rounded to {kind}"
        low, high = float(other.min()), float(other.max())
        if low < high and close(first.clip(low, high), other, rtol=1e-6):
            yield "clip", f"{name} has the other's numbers, clipped to [{low:.4g}, {high:.4g}]"
    rows = (np.abs(x - y) > 1e-6 + 1e-5 * np.abs(x)).reshape(len(x), -1).any(1)
    used = (x != 0) & (y != 0)
    if used.sum() > 1 and close(y / np.where(used, x, 1), ratio := median(y[used] / x[used]), used):
        if close((x != 0).astype(float), (y != 0).astype(float)):
            yield "scale", f"B's numbers are A's times {ratio:.5g}"
    gap = y - x
    inside = inside_of(a, x)
    if inside.any() and rows.all() and close(gap, offset := median(gap[inside]), inside):
        yield "offset", f"B's numbers are A's plus {offset:.5g}"
    if x.ndim == 2 and x.shape[1] > 2:
        if close(x[:, :-1], y[:, 1:], inside[:, 1:]) and not close(x, 0.0):
            yield "shift", "B's numbers are A's, one token later"
        if close(x[:, 1:], y[:, :-1], inside[:, 1:]) and not close(x, 0.0):
            yield "shift", "B's numbers are A's, one token earlier"
    sums = [z if z.ndim == 1 else z.sum(1) for z in (x, y)]
    yield from of_rows(sums[0], sums[1], rows, a, b)
    if x.ndim == 2:
        yield from of_places(x, y, a)


SOURCES = (
    (
        *("old_log_probs", "rollout_log_probs"),
        "old log-probs are those of the sampler (algorithm.rollout_correction.bypass_mode=true)",
        "are computed by the trainer (bypass_mode=false)",
    ),
    (
        *("log_probs", "old_log_probs"),
        "log-probs in the loss are those before the update",
        "are others: dropout is on, or the weights or their precision have changed",
    ),
)
"""Log-probs, those that they may equal, and the words for equal and other log-probs."""


def of_sources(a: Step, b: Step) -> Iterator[Relation]:
    """Yield that only one side's log-probs equal other log-probs that it recorded."""
    for name, source, equal, other in SOURCES:
        if all(name in step.arrays and source in step.arrays for step in (a, b)):
            first, second = (close(s.arrays[name], s.arrays[source], rtol=1e-3) for s in (a, b))
            if first != second:
                side, rest = "AB" if first else "BA"
                yield "source of log-probs", f"{side}'s {equal}, {rest}'s {other}"


def of_rows(x: np.ndarray, y: np.ndarray, rows: np.ndarray, a: Step, b: Step) -> Iterator[Relation]:
    """Yield what the differing rows have in common."""
    truncated = a.arrays.get("truncated", b.arrays.get("truncated"))
    if truncated is not None and truncated.any() and np.array_equal(rows, rows & (truncated != 0)):
        zero = " and are 0 there" if not np.any(y[rows]) else ""
        yield "truncated rows", f"B's numbers differ only in truncated rows{zero}"
    if len(x) > 2 and close(np.sort(x), np.sort(y)) and not (rows.all() and close(x, y)):
        yield "order", "B has A's numbers in other rows"
    lengths = a.arrays.get("response_lengths")
    if lengths is not None and len(np.unique(lengths)) > 2 and rows.sum() > 2:
        design = np.stack([lengths, np.ones(len(x))], 1).astype(float)
        (slope, base), *_ = np.linalg.lstsq(design[rows], (y - x)[rows], rcond=None)
        fits = close((y - x)[rows], design[rows] @ np.array([slope, base]))
        if fits and abs(slope) > 1e-6 and len(np.unique(lengths[rows])) > 2:
            yield "length", f"B adds {slope:.4g} per token of the response, and {base:.4g}"
    if close(x - x.mean(), (y - y.mean()) * np.std(x) / max(np.std(y), 1e-12), rtol=1e-4):
        factor = np.std(y) / max(np.std(x), 1e-12)
        shift = y.mean() - factor * x.mean()
        if np.std(x) > 1e-6 and abs(shift) > 1e-6 and abs(factor - 1) > 1e-6:
            yield "affine", f"B's numbers are A's times {factor:.5g} plus {shift:.5g}"
    if rows.sum() == 1 and len(rows) > 2:
        yield "one row", f"only row {int(np.argmax(rows))} differs"


def of_places(x: np.ndarray, y: np.ndarray, a: Step) -> Iterator[Relation]:
    """Yield which positions of the responses differ."""
    lengths = a.arrays.get("response_lengths")
    if lengths is None:
        return
    wrong, places = np.abs(x - y) > 1e-6 + 1e-5 * np.abs(x), np.arange(x.shape[1])
    last = places == np.maximum(lengths, 1)[:, None] - 1
    if not (wrong & ~last).any():
        yield "end token", "B's numbers differ only at the last token of responses (end token)"
    elif not (wrong & (places > 0)).any():
        yield "first token", "B's numbers differ only at the first token of responses"


def of_ids(name: str, a: Step, b: Step) -> Iterator[Relation]:
    """Yield how B's tokens follow from A's."""
    first, other = a.ids(name), b.ids(name)
    if first is None or other is None:
        return
    if same_rows(a, b) is not None or sorted(map(bytes, first)) == sorted(map(bytes, other)):
        yield "order", f"B has the same {name} in another order (shuffling, data.shuffle)"
    elif {*map(bytes, first)} == {*map(bytes, other)}:
        yield "repeated", f"B has the same {name}, repeated another number of times"
    if len(first) != len(other):
        if {*map(bytes, other)} < {*map(bytes, first)}:
            yield "dropped", f"B lacks {len(first) - len(other)} of A's {len(first)} rows"
        return
    pairs = [(x, y) for x, y in zip(first, other, strict=True) if not np.array_equal(x, y)]
    for mine, theirs, side in ((0, 1, "B"), (1, 0, "A")):
        cut = [(pair[mine], pair[theirs]) for pair in pairs]
        if not all(len(y) < len(x) for x, y in cut):
            continue
        removed = [len(x) - len(y) for x, y in cut]
        if all(np.array_equal(x[: len(y)], y) for x, y in cut):
            ends = {int(x[-1]) for x, _ in cut}
            if name == "responses" and set(removed) == {1} and len(ends) == 1:
                yield "end token", f"{side} cuts the end token {ends.pop()}, the other keeps it"
            else:
                yield "truncation", f"{side} cuts {name} at the end, at {longest(cut)} tokens"
        elif all(np.array_equal(x[len(x) - len(y) :], y) for x, y in cut):
            if set(removed) == {1} and len({int(x[0]) for x, _ in cut}) == 1:
                yield "begin token", f"{side} has no begin token, the other adds {cut[0][0][0]}"
            else:
                yield "truncation", f"{side} cuts {name} at the left, at {longest(cut)} tokens"
    if name == "responses":
        for side, rows, step in (("A", first, a), ("B", other, b)):
            yield from of_groups(side, rows, step)


def longest(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
    return max(len(y) for _, y in pairs)


def of_groups(side: str, rows: Rows, step: Step) -> Iterator[Relation]:
    """Yield that all samples of each prompt are equal, as with one seed or greedy sampling."""
    prompts = step.ids("prompts")
    if prompts is None:
        return
    groups: dict[bytes, list[bytes]] = {}
    for prompt, row in zip(prompts, rows, strict=True):
        groups.setdefault(bytes(prompt), []).append(bytes(row))
    several = [group for group in groups.values() if len(group) > 1]
    if several and all(len(set(group)) == 1 for group in several):
        yield "duplicated seeds", f"in {side}, all samples of a prompt are equal (seed or greedy)"
    elif several and all(len(set(group)) <= len(group) // 2 for group in several):
        yield "duplicated seeds", f"in {side}, samples of a prompt come in equal pairs (seeds)"


def of_steps(name: str, a: Step, b: Step) -> Iterator[Relation]:
    """Yield by how many steps B's rows are those of A's earlier or later steps."""
    for shift in (-2, -1, 1, 2):
        for mine, other, side in ((a, b, "B"), (b, a, "A")):
            number = mine.number + shift
            if number not in mine.side.steps or number < 1:
                continue
            first, second = Step.of(mine.side, number).ids(name), other.ids(name)
            if first and second and sorted(map(bytes, first)) == sorted(map(bytes, second)):
                word = "repeats" if shift < 0 else "skips"
                words = f"{side} {word} {abs(shift)} step of {name} (resume, or another start)"
                yield "resume", words


def of_schedules(a: Step, b: Step) -> Iterator[Relation]:
    """Yield how the learning rates of both sides follow from each other."""
    steps = sorted(a.side.steps.keys() & b.side.steps.keys())
    x, y = (np.array([s.steps[n].get("lr", np.nan) for n in steps]) for s in (a.side, b.side))
    known = ~(np.isnan(x) | np.isnan(y))
    x, y = x[known], y[known]
    if len(x) > 2 and len(np.unique(x)) > 1:
        for name, late, early in (("B", y, x), ("A", x, y)):
            if np.allclose(late[1:], early[:-1], rtol=1e-5) and not np.allclose(late, early):
                yield "off by one", f"{name}'s schedule of the learning rate is one step late"
                return
    if len(x) and np.all(x > 0) and np.allclose(y / x, y[0] / x[0], rtol=1e-5):
        yield "scale", f"B's learning rate is A's times {y[0] / x[0]:.5g}"
    for name, rates in (("A", x), ("B", y)):
        if len(rates) > 2 and np.all(np.diff(rates) >= 0) and rates[0] < rates[-1]:
            yield "warm-up", f"{name} warms the learning rate up: {rates[0]:.3g} to {rates[-1]:.3g}"
        elif len(rates) > 1 and np.all(np.diff(rates) <= 0) and rates[0] > rates[-1]:
            yield "decay", f"{name} decays the learning rate: {rates[0]:.3g} to {rates[-1]:.3g}"


def of_numbers(x: Any, y: Any) -> Iterator[Relation]:
    """Yield the factor between two numbers, or between the numbers of all names."""
    pairs = [(x[n], y[n]) for n in x.keys() & y.keys()] if isinstance(x, Mapping) else [(x, y)]
    zeros = [n for n in x.keys() & y.keys() if x[n] and not y[n]] if isinstance(x, Mapping) else []
    if zeros:
        yield "frozen", f"B has 0 for {', '.join(zeros[:3])}: not trained there"
    ratios = np.array([q / p for p, q in pairs if p and q])
    if len(ratios) and np.allclose(ratios, ratios[0], rtol=1e-3):
        whole = round(max(ratios[0], 1 / ratios[0]))
        if whole > 1 and np.isclose(max(ratios[0], 1 / ratios[0]), whole, rtol=2e-3):
            side = "B's" if ratios[0] > 1 else "A's"
            yield "accumulation", f"{side} numbers are {whole} times larger: a count of passes"


def close(x: Any, y: Any, where: np.ndarray | None = None, rtol: float = 1e-5) -> bool:
    """Return whether arrays are equal but for rounding, everywhere or where a mask says."""
    fits = np.isclose(x, y, rtol=rtol, atol=1e-6)
    return bool(fits.all() if where is None else fits[where].all())


def median(values: np.ndarray) -> float:
    return float(np.median(values))


def inside_of(step: Step, like: np.ndarray) -> np.ndarray:
    """Return a mask of the tokens of responses; true everywhere for numbers of rows."""
    lengths = step.arrays.get("response_lengths")
    if like.ndim == 1 or lengths is None:
        return np.ones(like.shape, dtype=bool)
    inside: np.ndarray = np.arange(like.shape[1]) < lengths[:, None]
    return inside


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Return the numbers rounded to bfloat16."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(float)


def float16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(float)
