"""The walk: stages of a step in order, until a number differs by more than rounding."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from trainer.config.keys import NAMES_OF_A_RUN
from trainer.tools.bisect.probes import formulas_of
from trainer.tools.bisect.sides import IDS, OURS, STAGES, Side, Step


class Field(NamedTuple):
    """A field of a step, and the rounding that its stage allows."""

    stage: str
    name: str
    absolute: float
    relative: float


FIELDS = [
    Field(stage["stage"], name, *stage.get("rounding", (0.0, 0.0)))
    for stage in STAGES
    for name in stage["fields"]
]
"""Fields in the order of a step."""
AFTER_RATE = ("loss", "gradients", "optimizer")
FIELDS_OF_UPDATES = sorted(FIELDS, key=lambda item: item.stage in AFTER_RATE)
"""The order if a step has several updates: the learning rate acts on the loss of the second."""
FORMULA_STAGES = ("advantages", "loss", "learning rate", "optimizer")
"""Stages that are compared where two frameworks have drawn different samples."""
COSMETIC = {
    *NAMES_OF_A_RUN,
    *("trainer.default_local_dir", "trainer.record", "trainer.logger", "output_dir", "run_name"),
    *("logging_dir", "trainer.total_training_steps", "trainer.save_freq"),
}
"""Keys that change no number by themselves."""

SPELLINGS = {"actor_rollout_ref.rollout.top_k": (0, -1)}
"""Key -> another framework's value, and ours of the same meaning."""


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
    """The first difference of B's steps on A's samples, if they were computed."""
    forced_steps: list[int] = field(default_factory=list)


Pair = tuple[Step, Step]


def walk(
    a: Side, b: Side, progress: Callable[[str], None] = lambda line: None
) -> tuple[Finding, Pair | None]:
    """Return the first difference, and the steps in which it is.

    Two frameworks draw different samples. Of these, the learning rates and the formulas of
    advantages, loss and optimizer are compared.
    """
    common = sorted(a.steps.keys() & b.steps.keys())
    finding = Finding(settings=different_settings(a, b), steps=len(common))
    by_chance: tuple[Finding, Pair] | None = None
    for number in common:
        progress(f"step {number} of {common[-1]}")
        for difference, pair in differences(Step.of(a, number), Step.of(b, number), finding):
            result = replace(finding, verdict="differs", step=number, **difference), pair
            stage, name = difference["stage"], difference["name"]
            is_formula = name == "lr" or stage in FORMULA_STAGES and all(formulas_of(name, pair))
            may_be_chance = a.framework != b.framework and stage in ("prompts", "samples")
            if is_formula if by_chance else not may_be_chance:
                return result
            by_chance = by_chance or result
    if by_chance is not None:
        note = "two frameworks draw different samples; no formula differs in what they record"
        finding.notes.append(note)
        return by_chance
    if not finding.compared:
        fields = [", ".join(fields_of(side)) or "nothing" for side in (a, b)]
        finding.verdict = "cannot tell"
        finding.reason = f"{len(common)} common steps and no common field: "
        finding.reason += f"A has {fields[0]}; B has {fields[1]}"
    elif absent := absent_step(a, b, common):
        finding.verdict = "cannot tell"
        finding.reason = f"{absent}; the steps of both are equal: {', '.join(finding.compared)}"
    return finding, None


def absent_step(a: Side, b: Side, common: Sequence[int]) -> str:
    """Return which step one side lacks after the first common step, or an empty text."""
    for (name, side), (other_name, other) in (("A", a), ("B", b)), (("B", b), ("A", a)):
        absent = sorted(n for n in other.steps.keys() - side.steps.keys() if n > common[0])
        last = max(side.steps)
        if absent and absent[0] > last:
            return f"{name} ends after step {last}, {other_name} goes on to step {absent[-1]}"
        if absent:
            return f"{name} has no step {absent[0]}"
    return ""


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
        if difference:
            stage = "model" if item.stage == "optimizer" and a.number == 0 else item.stage
            if moved and stage in ("prompts", "samples"):
                stage = "order"
            yield {"stage": stage, "name": item.name, **difference}, (a, b)


def pair_of(name: str, a: Step, b: Step) -> tuple[np.ndarray, np.ndarray, list[str]] | None:
    """Return both sides' numbers in one form, and their names; None if a side lacks the field."""
    clipped = name == "grad_norms" and a.side.framework != b.side.framework  # perhaps in one side
    if clipped or not all(name in step.arrays for step in (a, b)):
        return None
    x, y = (step.arrays[name].astype(float) for step in (a, b))
    if name in a.names:
        named = [dict(zip(s.names[name], z, strict=True)) for s, z in ((a, x), (b, y))]
        names = sorted(named[0].keys() & named[1].keys())
        x, y = (np.array([numbers[n] for n in names]) for numbers in named)
        return x, y, names
    if x.ndim != y.ndim:
        x, y = (z if z.ndim == 1 else z.sum(1) for z in (x, y))
    elif x.ndim == 2:
        fill, width = -1 if name in IDS else 0, max(x.shape[1], y.shape[1])
        x, y = (np.pad(z, ((0, 0), (0, width - z.shape[1])), constant_values=fill) for z in (x, y))
    return x, y, []


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
    values: dict[str, Any] = {"a": x[where].item(), "b": y[where].item()}
    if item.name in IDS:
        values = {side: "end" if x < 0 else int(x) for side, x in values.items()}
    else:
        values |= {"difference": float(gap[where]), "allowed": float(allowed[where])}
    if names:
        return values | {"place": names[int(where[0])]}
    num_differing = int(wrong.reshape(len(x), -1).any(1).sum())
    values |= {"row": int(where[0]), "num_rows": len(x), "num_differing": num_differing}
    return values | ({"place": f"token {where[1]}"} if x.ndim == 2 else {})


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
    if not keys[0] or sorted(keys[0]) != sorted(keys[1]):
        return None
    places: dict[Any, list[int]] = {}
    for row, key in enumerate(keys[1]):
        places.setdefault(key, []).append(row)
    return np.array([places[key].pop(0) for key in keys[0]])


def only_balanced(a: Step, b: Step, order: np.ndarray) -> bool:
    """Return whether the order makes no difference: mini-batch k of K has the rows k, k + K, ..."""
    if a.side.framework != b.side.framework:
        return True
    count = a.num_updates
    return a.side.framework == OURS and np.array_equal(order % count, np.arange(len(order)) % count)


def fields_of(side: Side) -> list[str]:
    """Return the fields of the side's first steps."""
    steps = [Step.of(side, number) for number in sorted(side.steps)[:2]]
    return sorted({name for step in steps for name in step.arrays} - {"step"})


def different_settings(a: Side, b: Side) -> dict[str, list[Any]]:
    """Return the keys with different values; of two frameworks, those that have a common meaning.

    A key that a side does not set is None, and another framework's is then not compared.
    """
    models = [model_config(side) for side in (a, b) if side.model_path]
    if a.framework == b.framework:
        keys = {key: [key] for key in sorted((a.config.keys() | b.config.keys()) - COSMETIC)}
    else:
        rows = [row.split() for stage in STAGES for row in stage["settings"]]
        keys = {names[0]: names for names in rows}
    pairs = {
        key: [spelled(key, side.setting(*names)) for side in (a, b)] for key, names in keys.items()
    }
    for key, pair in [*pairs.items()]:
        if None in pair and (a.framework != b.framework or key.startswith("version of ")):
            del pairs[key]
    common = sorted(set.intersection(*map(set, models))) if len(models) == 2 else []
    pairs |= {f"model's {key}": [model[key] for model in models] for key in common}
    return {key: pair for key, pair in pairs.items() if not are_equal(*pair)}


def spelled(key: str, value: Any) -> Any:
    """Return our spelling of a setting's value."""
    theirs, ours = SPELLINGS.get(key, (None, None))
    return ours if value == theirs and value is not None else value


def model_config(side: Side) -> dict[str, Any]:
    """Return the configuration of the side's model, if it is here."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(side.model_path, local_files_only=True)
    except (OSError, ValueError):
        return {}
    return {key: x for key, x in config.items() if key not in ("_name_or_path", "dtype")}


def are_equal(x: Any, y: Any) -> bool:
    """Return whether two settings are equal; numbers may be text, and files have their contents."""
    try:
        return bool(np.isclose(float(x), float(y), rtol=1e-6, atol=0))
    except (TypeError, ValueError):
        return str(x).lower() == str(y).lower() or with_contents(x) == with_contents(y)


def with_contents(value: Any) -> Any:
    """Return a setting in which the digest of a file stands for its path.

    It is of every byte, unlike that of `trainer.run_folder.resume`, which samples large files.
    """
    if isinstance(value, dict):
        return {name: with_contents(below) for name, below in value.items()}
    if isinstance(value, list):
        return [with_contents(below) for below in value]
    if isinstance(value, str) and os.path.isfile(value):  # False for texts too long for a path, too
        with open(value, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return value


def decoded(steps: Pair, row: int | None, tokenizer: Any) -> list[str]:
    """Return the row and its neighbors of both sides as text, or as ids without a tokenizer."""
    lines: list[str] = []
    if row is None:
        return lines
    for name, step in zip("AB", steps, strict=True):
        rows = [*zip(step.ids("prompts"), step.ids("responses"), strict=False)]
        for number in range(max(row - 1, 0), min(row + 2, len(rows))):
            words = [
                repr(tokenizer.decode(ids)) if tokenizer else str(ids.tolist()[:12])
                for ids in rows[number]
            ]
            lines.append(f"{name} row {number}: {' -> '.join(words)}")
    return lines
