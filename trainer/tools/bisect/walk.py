"""The walk: stages of a step in order, until a number differs by more than rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trainer.config.flat import NAMES_OF_A_RUN
from trainer.tools.bisect.sides import OURS, Arrays, Side
from verl_like.errors import ConfigError

Rows = list[np.ndarray]
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Quantity:
    """A quantity of a step, and the rounding that its stage allows."""

    stage: str
    name: str
    absolute: float = 0.0
    relative: float = 0.0


FIELDS = (
    Quantity("prompts", "prompts"),
    Quantity("samples", "responses"),
    Quantity("samples", "policy_version"),
    Quantity("samples", "seeds"),
    Quantity("mask", "response_mask"),
    Quantity("log-probs", "rollout_log_probs", 2e-4, 1e-4),
    Quantity("log-probs", "old_log_probs", 2e-4, 1e-4),
    Quantity("reference", "ref_log_prob", 2e-4, 1e-4),
    Quantity("values", "values", 2e-4, 1e-4),
    Quantity("scores", "scores", 1e-6, 1e-6),
    Quantity("rewards", "rewards", 1e-5, 1e-5),
    Quantity("advantages", "advantages", 2e-5, 2e-5),
    Quantity("advantages", "returns", 2e-5, 2e-5),
    Quantity("loss inputs", "mini_batch"),
    Quantity("loss inputs", "rollout_is_weights", 1e-4, 1e-4),
    Quantity("loss inputs", "log_probs", 2e-4, 1e-4),
    Quantity("loss", "pg_loss", 1e-5, 1e-4),
    Quantity("loss", "kl_loss", 1e-5, 1e-3),
    Quantity("loss", "loss", 1e-5, 1e-4),
    Quantity("gradients", "grad_norms", 1e-6, 1e-3),
    Quantity("gradients", "grad_norm", 1e-6, 1e-3),
    Quantity("learning rate", "lr", 0.0, 1e-6),
    Quantity("optimizer", "weight_norms", 1e-9, 2e-6),
)
"""Fields in the order of a step; a stage is a name, and its fields follow each other."""
AFTER_RATE = ("loss", "gradients", "optimizer")
FIELDS_OF_UPDATES = tuple(sorted(FIELDS, key=lambda item: item.stage in AFTER_RATE))
"""The order if a step has several updates: the learning rate acts on the loss of the second."""
TOKENS = (
    *("response_mask", "rollout_log_probs", "old_log_probs", "log_probs", "ref_log_prob"),
    *("values", "rewards", "advantages", "returns", "rollout_is_weights"),
)


@dataclass
class Finding:
    """The first difference, and its context."""

    verdict: str
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Step:
    """The quantities of one step of one side, in a common form."""

    side: Side
    number: int
    arrays: Arrays
    numbers: Mapping[str, Any]

    @classmethod
    def of(cls, side: Side, number: int) -> Step:
        arrays, numbers = dict(side.load(number)), dict(side.steps[number])
        check_shapes(side, number, arrays)
        for total, tokens in (("scores", "token_level_scores"), ("rewards", "token_level_rewards")):
            if tokens in arrays:
                arrays[total] = arrays[tokens].sum(-1) if total == "scores" else arrays[tokens]
        lengths = arrays.get("response_lengths")
        if lengths is None and "response_mask" in arrays:
            mask = arrays["response_mask"] != 0
            lengths = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)
            arrays["response_lengths"] = np.where(mask.any(1), lengths, 0)
        return cls(side, number, arrays, numbers)

    def ids(self, name: str) -> Rows | None:
        """Return the tokens of each row's prompt or response, without padding."""
        tokens = self.arrays.get(name)
        if tokens is None:
            return None
        if name == "prompts":
            mask = self.arrays.get("prompt_mask", np.ones_like(tokens)) != 0
            return [row[inside] for row, inside in zip(tokens, mask, strict=True)]
        lengths = self.arrays.get("response_lengths", np.full(len(tokens), tokens.shape[1]))
        return [row[:length] for row, length in zip(tokens, lengths, strict=True)]

    def in_order(self, order: np.ndarray) -> Step:
        arrays = {name: array[order] for name, array in self.arrays.items()}
        return Step(self.side, self.number, arrays, self.numbers)


def check_shapes(side: Side, number: int, arrays: Arrays) -> None:
    """Reject arrays whose numbers of rows or widths do not fit each other."""
    rows, width = None, None
    for name, array in arrays.items():
        if array.ndim == 0 or array.ndim > 2:
            raise ConfigError(f"{side.name}, step {number}: {name} has shape {array.shape}.")
        rows = len(array) if rows is None else rows
        if name.startswith(("response_mask", "responses", *TOKENS)) and array.ndim == 2:
            width = array.shape[1] if width is None else width
        wrong = array.ndim == 2 and not name.startswith("prompt") and array.shape[1] != width
        if len(array) != rows or wrong:
            raise ConfigError(
                f"{side.name}, step {number}: {name} has shape {array.shape}, but other arrays "
                f"have {rows} rows and {width} tokens. All arrays of a step have the same rows."
            )


def on_tokens(array: np.ndarray, step: Step, width: int) -> np.ndarray:
    """Return [rows, width] in float64, zero after each response; [rows] is copied to tokens."""
    lengths = step.arrays.get("response_lengths", np.full(len(array), width))
    inside = np.arange(width) < lengths[:, None]
    if array.ndim == 1:
        return np.where(inside, array[:, None].astype(float), 0.0)
    padded = np.zeros((len(array), max(width, array.shape[1])))
    padded[:, : array.shape[1]] = array
    return np.where(inside, padded[:, :width], 0.0)


def pair_of(quantity: Quantity, a: Step, b: Step) -> tuple[Any, Any] | None:
    """Return the field's values of both sides in the same form, or None if a side lacks it."""
    name = quantity.name
    if name in ("prompts", "responses"):
        ids = a.ids(name), b.ids(name)
        return None if ids[0] is None or ids[1] is None else (ids[0], ids[1])
    if name in a.arrays and name in b.arrays:
        x, y = a.arrays[name], b.arrays[name]
        if name == "rewards" and x.ndim != y.ndim:
            x, y = (z if z.ndim == 1 else z.sum(1) for z in (x, y))
            return x.astype(float), y.astype(float)
        if name not in TOKENS or x.ndim == y.ndim == 1:
            return x.astype(float), y.astype(float)
        width = max([z.shape[1] for z in (x, y) if z.ndim == 2])
        return on_tokens(x, a, width), on_tokens(y, b, width)
    if name in a.numbers and name in b.numbers:
        return a.numbers[name], b.numbers[name]
    return None


def first_difference(quantity: Quantity, x: Any, y: Any) -> dict[str, Any] | None:
    """Return where and by how much the values differ, or None if only by rounding."""
    if isinstance(x, list):
        return first_of_ids(x, y)
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return first_of_names(quantity, x, y)
    if not isinstance(x, np.ndarray):
        result = first_of_names(quantity, {"": x}, {"": y})
        return result and result | {"place": ""}
    if x.shape != y.shape:
        return {"a": f"shape {x.shape}", "b": f"shape {y.shape}"}
    gap, allowed = np.abs(x - y), quantity.absolute + quantity.relative * np.maximum(abs(x), abs(y))
    if x.dtype == float and quantity.absolute and all(is_rounded(z) for z in (x, y)):
        allowed = np.maximum(allowed, 2**-7 * np.maximum(abs(x), abs(y)))
    wrong = (gap > allowed) | (np.isnan(x) != np.isnan(y))
    if not wrong.any():
        return None
    rows = wrong.reshape(len(x), -1).any(1)
    row = int(np.argmax(rows))
    where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    return {
        "row": row,
        "place": f"token {where[-1]}" if x.ndim == 2 else "",
        "a": float(x[where]),
        "b": float(y[where]),
        "difference": float(gap[where]),
        "allowed": float(allowed[where]),
        "num_rows": len(x),
        "num_differing": int(rows.sum()),
    }


def is_rounded(x: np.ndarray) -> bool:
    """Return whether all numbers, some of them not short, are numbers of bfloat16."""
    bits = x.astype(np.float32).view(np.uint32)
    return bool((bits & 0xFFFF == 0).all() and len(np.unique(bits)) > 8)


def first_of_ids(x: Rows, y: Rows) -> dict[str, Any] | None:
    if len(x) != len(y):
        return {"a": f"{len(x)} rows", "b": f"{len(y)} rows"}
    rows = [n for n, pair in enumerate(zip(x, y, strict=True)) if not np.array_equal(*pair)]
    if not rows:
        return None
    first, other = x[rows[0]].tolist(), y[rows[0]].tolist()
    pairs = enumerate(zip(first, other, strict=False))
    place = next((n for n, (p, q) in pairs if p != q), min(len(first), len(other)))
    values = [ids[place] if place < len(ids) else "end" for ids in (first, other)]
    counts = {"num_rows": len(x), "num_differing": len(rows)}
    return {"row": rows[0], "place": f"token {place}", "a": values[0], "b": values[1], **counts}


def first_of_names(
    quantity: Quantity, x: Mapping[str, Any], y: Mapping[str, Any]
) -> dict[str, Any] | None:
    for name in sorted(x.keys() & y.keys()):
        first, other = x[name], y[name]
        if not all(isinstance(value, int | float) for value in (first, other)):
            raise ConfigError(f"{quantity.name} {name}: {first!r} or {other!r} is not a number.")
        allowed = quantity.absolute + quantity.relative * max(abs(first), abs(other))
        if not abs(first - other) <= allowed and first != other:
            gap = abs(first - other)
            found = {"place": name, "a": first, "b": other, "difference": gap}
            return found | {"allowed": allowed}
    return None


def same_rows(a: Step, b: Step) -> np.ndarray | None:
    """Return B's rows in the order of A's, or None if they are not the same rows."""
    keys: list[list[Any]] = []
    for step in (a, b):
        parts = [step.ids("prompts"), step.ids("responses")]
        if parts[0] is None or parts[1] is None:
            return None
        keys.append([tuple(map(bytes, row)) for row in zip(*parts, strict=True)])
    if len(keys[0]) != len(keys[1]):
        return None
    places: dict[Any, list[int]] = {}
    for row, key in enumerate(keys[1]):
        places.setdefault(key, []).append(row)
    order = [places[key].pop(0) if places.get(key) else -1 for key in keys[0]]
    return None if -1 in order else np.array(order)


def num_updates(step: Step) -> int:
    """Return the number of optimizer steps of a step; 1 if it is unknown."""
    if (mini := step.arrays.get("mini_batch")) is not None:
        return len(np.unique(mini))
    config, rows = step.side.config, len(step.arrays.get("responses", ()))
    per_update = config.get(f"{ACTOR}.ppo_mini_batch_size") or rows
    per_update *= config.get("actor_rollout_ref.rollout.n") or 1
    return int(max(rows // max(per_update, 1), 1) * config.get(f"{ACTOR}.ppo_epochs", 1))


def only_balanced(a: Step, b: Step, order: np.ndarray) -> bool:
    """Return whether the order makes no difference: mini-batch k of K has the rows k, k + K, ..."""
    if a.side.framework != b.side.framework:
        return True
    count = num_updates(a)
    return a.side.framework == OURS and np.array_equal(order % count, np.arange(len(order)) % count)


Fits = Callable[[str, Step], set[str]]


def walk(
    a: Side, b: Side, fits: Fits, progress: Callable[[str], None] = lambda line: None
) -> tuple[Finding, tuple[Step, Step] | None]:
    """Return the first difference, and the steps in which it is.

    `fits` returns the names of the formulas that give a stage's numbers; they are compared where
    two frameworks have drawn different samples.
    """
    settings, common = different_settings(a, b), sorted(a.steps.keys() & b.steps.keys())
    compared: dict[str, int] = {}
    waiting: tuple[Finding, tuple[Step, Step]] | None = None
    notes: dict[str, None] = {}
    for number in common:
        progress(f"step {number} of {common[-1]}")
        pair = Step.of(a, number), Step.of(b, number)
        order = same_rows(*pair)
        moved = order is not None and not np.array_equal(order, np.arange(len(order)))
        if moved and only_balanced(*pair, np.asarray(order)):
            moved = False
            notes[f"step {number}: B has A's rows in another order; rows were matched"] = None
            pair = pair[0], pair[1].in_order(np.asarray(order))
        for item in FIELDS_OF_UPDATES if num_updates(pair[0]) > 1 else FIELDS:
            values = pair_of(item, *pair)
            if values is None:
                continue
            compared[item.name] = compared.get(item.name, 0) + 1
            if waiting is not None and item.stage not in ("advantages", "loss", "learning rate"):
                continue
            if waiting is not None and item.stage != "learning rate":
                theirs = [fits(item.name, step) for step in pair]
                if not all(theirs) or theirs[0] & theirs[1]:
                    continue
            difference = first_difference(item, *values)
            if difference is None:
                continue
            stage = item.stage
            if moved and stage in ("prompts", "samples"):
                stage = "order"
            if stage == "optimizer" and number == 0:
                stage = "model"
            finding = Finding("differs", "", stage, number, item.name, **difference)
            by_chance = stage in ("prompts", "samples") and a.framework != b.framework
            if by_chance and waiting is None:
                waiting = finding, pair
                continue
            return completed(finding, settings, notes, compared, len(common)), pair
    if waiting is not None:
        finding, pair = waiting
        notes["two frameworks draw different samples; no formula differs in what they record"] = (
            None
        )
        return completed(finding, settings, notes, compared, len(common)), pair
    if not compared:
        have = [", ".join(sorted(fields_of(side))) or "nothing" for side in (a, b)]
        reason = f"{len(common)} common steps and no common field: A has {have[0]}; B has {have[1]}"
        return completed(Finding("cannot tell", reason), settings, notes, compared, 0), None
    return completed(Finding("equal"), settings, notes, compared, len(common)), None


def completed(
    finding: Finding,
    settings: dict[str, list[Any]],
    notes: Mapping[str, None],
    compared: Mapping[str, int],
    steps: int,
) -> Finding:
    finding.settings, finding.notes = settings, list(notes)
    finding.compared, finding.steps = list(compared), steps
    return finding


def fields_of(side: Side) -> set[str]:
    """Return the fields of the side's first steps."""
    fields: set[str] = set()
    for number in sorted(side.steps)[:2]:
        fields |= {*side.load(number), *side.steps[number]} - {"step"}
    return fields


COSMETIC = {
    *NAMES_OF_A_RUN,
    *("trainer.default_local_dir", "trainer.record", "trainer.logger", "output_dir", "run_name"),
    *("logging_dir", "trainer.total_training_steps", "trainer.save_freq"),
}
"""Keys that change no number by themselves."""


def different_settings(a: Side, b: Side) -> dict[str, list[Any]]:
    """Return the keys with different values, for two runs of one framework."""
    if a.framework != b.framework:
        return {}
    keys = sorted((a.config.keys() | b.config.keys()) - COSMETIC)
    values = {key: [a.config.get(key), b.config.get(key)] for key in keys}
    differing = {key: pair for key, pair in values.items() if pair[0] != pair[1]}
    for name in sorted(a.versions.keys() & b.versions.keys()):
        if a.versions[name] != b.versions[name]:
            differing[f"version of {name}"] = [a.versions[name], b.versions[name]]
    return differing


def decoded(steps: Sequence[Step], row: int | None, tokenizer: Any) -> list[str]:
    """Return the row and its neighbors of both sides as text, or as ids without a tokenizer."""
    lines = []
    for name, step in zip("AB", steps, strict=True):
        prompts, responses = step.ids("prompts"), step.ids("responses")
        if row is None or prompts is None or responses is None:
            continue
        for number in range(max(row - 1, 0), min(row + 2, len(prompts), len(responses))):
            texts = [
                repr(tokenizer.decode(ids)) if tokenizer else str(ids.tolist()[:12])
                for ids in (prompts[number], responses[number])
            ]
            lines.append(f"{name} row {number}: {texts[0]} -> {texts[1]}")
    return lines
