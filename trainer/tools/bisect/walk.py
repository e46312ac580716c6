"""The walk: stages of a step in order, until a number differs by more than rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml  # type: ignore[import-untyped]

from trainer.config.flat import NAMES_OF_A_RUN
from trainer.tools.bisect.probes import formulas_differ
from trainer.tools.bisect.sides import OURS, Side, Step
from verl_like.errors import ConfigError
from verl_like.record import padded


class Field(NamedTuple):
    """A field of a step, and the rounding that its stage allows."""

    stage: str
    name: str
    absolute: float
    relative: float


STAGES = yaml.safe_load(Path(__file__).with_name("stages.yaml").read_text(encoding="utf-8"))
FIELDS = [
    Field(stage["stage"], name, *stage.get("rounding", (0.0, 0.0)))
    for stage in STAGES
    for name in stage["fields"]
]
"""Fields in the order of a step."""
AFTER_RATE = ("loss", "gradients", "optimizer")
FIELDS_OF_UPDATES = sorted(FIELDS, key=lambda item: item.stage in AFTER_RATE)
"""The order if a step has several updates: the learning rate acts on the loss of the second."""
OF_FORMULAS = ("advantages", "loss", "learning rate")
"""Stages that are compared where two frameworks have drawn different samples."""
COSMETIC = {
    *NAMES_OF_A_RUN,
    *("trainer.default_local_dir", "trainer.record", "trainer.logger", "output_dir", "run_name"),
    *("logging_dir", "trainer.total_training_steps", "trainer.save_freq"),
}
"""Keys that change no number by themselves."""


@dataclass
class Finding:
    """The first difference, and its context."""

    verdict: str = "equal"
    """equal, differs or cannot tell."""
    reason: str = ""
    stage: str = ""
    step: int = 0
    name: str = ""
    """The field."""
    row: int | None = None
    """The row; None for a number of the whole step."""
    place: str = ""
    """The token's position or the weight's name."""
    a: Any = None
    b: Any = None
    difference: float | None = None
    allowed: float | None = None
    num_rows: int = 0
    num_differing: int = 0
    text: list[str] = field(default_factory=list)
    """The rows around it, decoded."""
    causes: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, list[Any]] = field(default_factory=dict)
    """Key -> its values in A and B."""
    notes: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    steps: int = 0
    forced: Finding | None = None
    """The first difference of B's step on A's samples, if it was computed."""


Pair = tuple[Step, Step]


def walk(
    a: Side, b: Side, progress: Callable[[str], None] = lambda line: None
) -> tuple[Finding, Pair | None]:
    """Return the first difference, and the steps in which it is.

    Two frameworks draw different samples. Of these, the learning rates and the formulas of
    advantages and loss are compared.
    """
    common = sorted(a.steps.keys() & b.steps.keys())
    finding = Finding(settings=different_settings(a, b), steps=len(common))
    by_chance: tuple[Finding, Pair] | None = None
    for number in common:
        progress(f"step {number} of {common[-1]}")
        for difference, pair in differences(Step.of(a, number), Step.of(b, number), finding):
            found = replace(finding, verdict="differs", step=number, **difference)
            if by_chance is None:
                if found.stage not in ("prompts", "samples") or a.framework == b.framework:
                    return found, pair
                by_chance = found, pair
            elif found.stage in OF_FORMULAS:
                if found.name == "lr" or formulas_differ(found.name, pair):
                    return found, pair
    if by_chance is not None:
        note = "two frameworks draw different samples; no formula differs in what they record"
        finding.notes.append(note)
        return by_chance
    if not finding.compared:
        have = [", ".join(sorted(fields_of(side))) or "nothing" for side in (a, b)]
        reason = f"{len(common)} common steps and no common field: A has {have[0]}; B has {have[1]}"
        return replace(finding, verdict="cannot tell", reason=reason), None
    return finding, None


def differences(a: Step, b: Step, finding: Finding) -> Iterator[tuple[dict[str, Any], Pair]]:
    """Yield the fields of a step that differ, in order; extend the finding's context."""
    order = same_rows(a, b)
    moved = order is not None and not np.array_equal(order, np.arange(len(order)))
    if moved and order is not None and only_balanced(a, b, order):
        moved, b = False, b.in_order(order)
        words = f"step {a.number}: B has A's rows in another order; rows were matched"
        finding.notes.append(words)
    for item in FIELDS_OF_UPDATES if a.num_updates > 1 else FIELDS:
        values = pair_of(item.name, a, b)
        if values is None:
            continue
        if item.name not in finding.compared:
            finding.compared.append(item.name)
        difference = first_difference(item, *values)
        if difference is not None:
            stage = "model" if item.stage == "optimizer" and a.number == 0 else item.stage
            if moved and stage in ("prompts", "samples"):
                stage = "order"
            yield {"stage": stage, "name": item.name, **difference}, (a, b)


def pair_of(name: str, a: Step, b: Step) -> tuple[np.ndarray, np.ndarray, list[str]] | None:
    """Return both sides' numbers in one form, and their names; None if a side lacks the field.

    Numbers of tokens are [rows, tokens], of rows [rows], and of a step [names]. Ids end with -1.
    """
    sides = a, b
    if name in ("prompts", "responses"):
        ids = a.ids(name), b.ids(name)
        if not ids[0] or not ids[1]:
            return None
        width = max(len(row) for rows in ids for row in rows)
        x, y = (padded(rows, width, fill=-1) for rows in ids)
        return x, y, []
    if all(name in step.arrays for step in sides):
        x, y = (step.arrays[name] for step in sides)
        if name == "rewards" and x.ndim != y.ndim:
            x, y = (z if z.ndim == 1 else z.sum(1) for z in (x, y))
        if x.ndim == y.ndim == 1:
            return x.astype(float), y.astype(float), []
        width = max(z.shape[1] for z in (x, y) if z.ndim == 2)
        return a.on_tokens(x, width), b.on_tokens(y, width), []
    if name == "grad_norms" and a.side.framework != b.side.framework:  # one may be clipped
        return None
    if all(name in step.numbers for step in sides):
        named = [step.numbers[name] for step in sides]
        named = [numbers if isinstance(numbers, dict) else {"": numbers} for numbers in named]
        names = sorted(named[0].keys() & named[1].keys())
        for value in [numbers[n] for numbers in named for n in names]:
            if not isinstance(value, int | float):
                raise ConfigError(f"{name} of step {a.number}: {value!r} is not a number.")
        x, y = (np.array([numbers[n] for n in names], dtype=float) for numbers in named)
        return x, y, names
    return None


def first_difference(
    item: Field, x: np.ndarray, y: np.ndarray, names: Sequence[str]
) -> dict[str, Any] | None:
    """Return where and by how much the numbers differ, or None if only by rounding."""
    if x.shape != y.shape:
        return {"a": f"shape {x.shape}", "b": f"shape {y.shape}"}
    with np.errstate(invalid="ignore"):
        gap, size = np.abs(x - y), np.maximum(abs(x), abs(y))
    allowed = item.absolute + item.relative * size
    if item.absolute and not names and all(is_rounded(z) for z in (x, y)):
        allowed = np.maximum(allowed, 2**-7 * size)
    wrong = (x != y) & ~((gap <= allowed) & np.isfinite(gap)) & ~(np.isnan(x) & np.isnan(y))
    if not wrong.any():
        return None
    where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    first, other = x[where].item(), y[where].item()
    if item.name in ("prompts", "responses"):
        gaps, values = {}, {"a": first, "b": other}
        values = {side: "end" if value < 0 else value for side, value in values.items()}
    else:
        values = {"a": first, "b": other}
        gaps = {"difference": float(gap[where]), "allowed": float(allowed[where])}
    if names:
        return {"place": names[int(where[0])], **values, **gaps}
    rows = wrong.reshape(len(x), -1).any(1)
    counts = {"row": int(where[0]), "num_rows": len(x), "num_differing": int(rows.sum())}
    return {"place": f"token {where[1]}" if x.ndim == 2 else "", **values, **gaps, **counts}


def is_rounded(x: np.ndarray) -> bool:
    """Return whether bfloat16 holds all numbers exactly, and more than 8 of them differ."""
    bits = x.astype(np.float32).view(np.uint32)
    return bool((bits & 0xFFFF == 0).all() and len(np.unique(bits)) > 8)


def same_rows(a: Step, b: Step) -> np.ndarray | None:
    """Return B's rows in the order of A's, or None if they are not the same rows."""
    keys = [
        [tuple(map(bytes, row)) for row in zip(s.ids("prompts"), s.ids("responses"), strict=False)]
        for s in (a, b)
    ]
    if not keys[0] or len(keys[0]) != len(keys[1]):
        return None
    places: dict[Any, list[int]] = {}
    for row, key in enumerate(keys[1]):
        places.setdefault(key, []).append(row)
    order = [places[key].pop(0) if places.get(key) else -1 for key in keys[0]]
    return None if -1 in order else np.array(order)


def only_balanced(a: Step, b: Step, order: np.ndarray) -> bool:
    """Return whether the order makes no difference: mini-batch k of K has the rows k, k + K, ..."""
    if a.side.framework != b.side.framework:
        return True
    count = a.num_updates
    return a.side.framework == OURS and np.array_equal(order % count, np.arange(len(order)) % count)


def fields_of(side: Side) -> set[str]:
    """Return the fields of the side's first steps."""
    fields: set[str] = set()
    for number in sorted(side.steps)[:2]:
        fields |= {*side.load(number), *side.steps[number]} - {"step"}
    return fields


def different_settings(a: Side, b: Side) -> dict[str, list[Any]]:
    """Return the keys with different values, for two runs of one framework."""
    if a.framework != b.framework:
        return {}
    keys = sorted((a.config.keys() | b.config.keys()) - COSMETIC)
    pairs = {key: [a.config.get(key), b.config.get(key)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def decoded(steps: Pair, row: int | None, tokenizer: Any) -> list[str]:
    """Return the row and its neighbors of both sides as text, or as ids without a tokenizer."""
    lines: list[str] = []
    for name, step in zip("AB", steps, strict=True):
        rows = [*zip(step.ids("prompts"), step.ids("responses"), strict=False)]
        for number in () if row is None else range(max(row - 1, 0), min(row + 2, len(rows))):
            words = [
                repr(tokenizer.decode(ids)) if tokenizer else str(ids.tolist()[:12])
                for ids in rows[number]
            ]
            lines.append(f"{name} row {number}: {' -> '.join(words)}")
    return lines
