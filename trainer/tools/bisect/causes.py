"""The cause of a difference: formulas, settings, or how one side's numbers follow from the other's.

Of the settings that give a side's numbers (`probes.py`), those are named that do not give the other
side's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trainer.tools.bisect.probes import (
    COEFFICIENTS,
    FORMULAS,
    PROBES,
    Settings,
    common_settings,
    fitting,
)
from trainer.tools.bisect.sides import OURS, Step
from trainer.tools.bisect.walk import STAGES, Finding, Pair, pair_of, same_rows

Cause = dict[str, str]
Array = np.ndarray
UNKNOWN = "something else"
OTHERWISE = {"log-probs": " (a pass of its own, with dropout or other weights or precision)"}
MOST_UNKNOWN = 2
"""Differing settings that are named although none is known to act in the stage."""
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "log_probs")


def causes_of(finding: Finding, steps: Pair) -> list[Cause]:
    """Return the causes of the difference, the most certain first; empty if none is known."""
    name = finding.name
    if finding.stage == "samples":
        name = next((n for n in LOG_PROBS if all(n in s.arrays for s in steps)), name)
    causes = [*of_formulas(name, steps)]
    settings = [*of_settings(finding, steps)]
    if not causes or len(settings) == 1 or any(UNKNOWN in cause["sentence"] for cause in causes):
        causes += settings
    if not causes or finding.stage in ("prompts", "order", "samples", "learning rate"):
        related = [*of_relations(finding, steps)]
        causes += [{"probe": "relation", "sentence": x, "setting": ""} for x in related]
    return list({cause["sentence"]: cause for cause in causes}.values())


def of_formulas(name: str, steps: Pair) -> Iterator[Cause]:
    """Yield the settings with which a formula gives each side's numbers, if they differ."""
    if name not in FORMULAS:
        return
    found = [fitting(name, step) for step in steps]
    if not any(found) or common_settings(name, steps, found):
        return
    a, b = (x[0] if x else None for x in found)
    if a and b:  # of both searches from the other side's settings, the shorter one
        near = [fitting(name, step, x)[:1] for step, x in zip(steps, (b, a), strict=True)]
        pairs = [*((x, b) for x in near[0]), *((a, x) for x in near[1]), (a, b)]
        a, b = min(pairs, key=lambda pair: len(dict(pair[0].items() - pair[1].items())))
    said = [described(name, steps[0], a, b), described(name, steps[1], b, a)]
    unknown = f"{UNKNOWN}{OTHERWISE.get(FORMULAS[name][1], '')}"
    words = [f"with {x}" if x else unknown for x in said]
    sentence = f"A computes {words[0]}; B computes {words[1]}"
    known = " | ".join(x for x in said if x)
    yield {"probe": f"formula of {name}", "sentence": sentence, "setting": known}


def described(name: str, step: Step, settings: Settings | None, other: Settings | None) -> str:
    """Return the settings that the other side or, if it is unknown, the default does not have."""
    if settings is None:
        return ""
    probes = PROBES[FORMULAS[name][1]]
    other = other or {probe.argument: probe.choices(step)[0] for probe in probes}
    special = [p for p in probes if settings[p.argument] != other[p.argument]] or probes[:1]
    words = [probe.describe(settings[probe.argument]) for probe in special]
    if settings.get("coefficient") != other.get("coefficient"):
        words.append(f"{COEFFICIENTS[name]}={settings.get('coefficient', 0)}")
    return " ".join(words)


def of_settings(finding: Finding, steps: Pair) -> Iterator[Cause]:
    """Yield the settings that act in this stage and differ."""
    a, b = steps[0].side, steps[1].side
    stage = "prompts" if finding.stage == "order" else finding.stage
    rows = [text.split() for s in STAGES if s["stage"] == stage for text in s["settings"]]
    changed = dict(finding.settings)
    if a.framework != b.framework:
        for ours, *theirs in rows:
            values = [s.setting(ours, *([] if s.framework == OURS else theirs)) for s in (a, b)]
            if None not in values and not same(*values):
                changed[ours] = values
    keys = [
        key for ours, *theirs in rows for key in changed if key.startswith(ours) or key in theirs
    ]
    versions = [key for key in changed if key.startswith("version of ")]
    if not keys and len(changed) <= MOST_UNKNOWN:
        keys = [*changed]
    for key in dict.fromkeys([*keys, *versions]):
        x, y = changed[key]
        sentence = f"{key} is {x!r} in A and {y!r} in B"
        yield {"probe": "setting", "sentence": sentence, "setting": key}


def same(x: Any, y: Any) -> bool:
    """Return whether two settings are equal; numbers may be text."""
    try:
        return bool(np.isclose(float(x), float(y), rtol=1e-6, atol=0))
    except (TypeError, ValueError):
        return str(x).lower() == str(y).lower()


def of_relations(finding: Finding, steps: Pair) -> Iterator[str]:
    """Yield sentences about how one side's numbers follow from the other's."""
    values = pair_of(finding.name, *steps)
    if values is None:
        return
    if finding.name in ("prompts", "responses"):
        yield from of_steps(*steps)
        yield from of_ids(finding.name, *steps)
    elif finding.name == "lr":
        yield from of_schedules(*steps)
    elif values[0].shape == values[1].shape:
        yield from of_numbers(*values, steps[0])


ROUNDED: dict[str, Callable[[Array, Array], Array]] = {
    "rounded to bfloat16": lambda x, y: torch.from_numpy(x).bfloat16().double().numpy(),
    "rounded to float16": lambda x, y: x.astype(np.float16).astype(float),
    "clipped to the range of these": lambda x, y: x.clip(y.min(), y.max()),
}
"""Words -> a function of one side's numbers and of the other's that gives the other's."""
LINEAR: dict[str, Callable[[Array, Array], tuple[Array, list[Array]]]] = {
    "A's times {:.5g}": lambda x, length: (0 * x, [x]),
    "A's plus {:.5g}": lambda x, length: (x, [x**0]),
    "A's times {:.5g} plus {:.5g}": lambda x, length: (0 * x, [x, x**0]),
    "A's plus {:.4g} per token of the response plus {:.4g}": lambda x, length: (
        x,
        [length, x**0],
    ),
}
"""Words -> a function that gives what is added to multiples of arrays to give B's numbers."""


def of_numbers(x: Array, y: Array, names: Sequence[str], step: Step) -> Iterator[str]:
    """Yield how B's numbers of tokens, rows or names follow from A's, and where they differ."""
    for side, p, q in (("B", x, y), ("A", y, x)):
        for words, function in ROUNDED.items():
            if close(function(p, q), q, 1e-6) and not close(p, q, 1e-6) and len(p) > 1:
                yield f"{side} has the other's numbers {words}"
    wrong = ~np.isclose(x, y, rtol=1e-5, atol=1e-6)
    lengths = np.ones(x.shape) if names else np.broadcast_to(step.lengths(x), x.shape[:1])
    token = np.arange(x.shape[-1])
    if x.ndim == 2:
        wrong &= token < (lengths := lengths[:, None])
    for words, linear in LINEAR.items():
        base, inputs = linear(x[wrong], np.broadcast_to(lengths, x.shape)[wrong].astype(float))
        design = np.stack(inputs, 1)
        factors, _, rank, _ = np.linalg.lstsq(design, y[wrong] - base, rcond=None)
        of_few = len(base) == 1 and len(factors) == 1 and words.startswith("A's times")
        is_count = of_few and close(max(factors[0], 1 / factors[0]) % 1, 0.0, 1e-3)
        if (len(base) > len(factors) == rank or is_count) and close(
            base + design @ factors, y[wrong]
        ):
            yield f"B's numbers are {words.format(*factors)}"
            break
    if names:
        if absent := [name for name, p, q in zip(names, x, y, strict=True) if p and not q]:
            yield f"B has 0 for {', '.join(absent[:3])}: not trained there"
        return
    truncated = step.arrays.get("truncated", np.zeros(len(x))) != 0
    rows = wrong if x.ndim == 1 else wrong.any(1)
    places = {"in truncated rows": truncated, f"in row {int(rows.argmax())}": np.cumsum(rows) == 1}
    if x.ndim == 2:
        places = {words: rows[:, None] for words, rows in places.items()}
        places["at the last token of responses (end token)"] = token == lengths - 1
        places["at the first token of responses"] = token == 0
        for by, word in ((1, "later"), (-1, "earlier")):
            moved = np.roll(x, by, axis=1)
            if close(moved[:, 1:-1], y[:, 1:-1]) and not close(x, 0.0):
                yield f"B's numbers are A's, one token {word}"
    for words, place in places.items():
        if len(x) > 1 and not (wrong & ~place).any():
            yield f"B's numbers differ only {words}" + (" and are 0 there" * (not y[wrong].any()))
    if close(np.sort(x, axis=0), np.sort(y, axis=0)):
        yield "B has A's numbers in other rows"


def close(x: Any, y: Any, rtol: float = 1e-5) -> bool:
    return bool(np.allclose(x, y, rtol=rtol, atol=1e-6))


def of_ids(name: str, a: Step, b: Step) -> Iterator[str]:
    """Yield how B's tokens follow from A's."""
    sides = a.ids(name), b.ids(name)
    rows = [[bytes(row) for row in side] for side in sides]
    if same_rows(a, b) is not None or sorted(rows[0]) == sorted(rows[1]):
        yield f"B has the same {name} in another order (shuffling, data.shuffle)"
    elif {*rows[0]} == {*rows[1]}:
        yield f"B has the same {name}, repeated another number of times"
    if len(rows[0]) != len(rows[1]):
        if {*rows[1]} < {*rows[0]}:
            yield f"B lacks {len(rows[0]) - len(rows[1])} of A's {len(rows[0])} rows"
        return
    pairs = [(x, y) for x, y in zip(*sides, strict=True) if not np.array_equal(x, y)]
    for side, (long, short) in (("B", (0, 1)), ("A", (1, 0))):
        cut = [(pair[long], pair[short]) for pair in pairs]
        if not all(len(y) < len(x) for x, y in cut):
            continue
        for end, part in (("end", slice(None)), ("left", slice(None, None, -1))):
            if all(np.array_equal(x[part][: len(y)], y[part]) for x, y in cut):
                gone = {tuple(x[part][len(y) :]) for x, y in cut}
                tokens = f"token {gone.pop()[0]}" if len(gone) == 1 == len([*gone][0]) else ""
                most = max(len(y) for _, y in cut)
                yield f"{side} cuts {name} at the {end}" + (
                    f": {'end' if end == 'end' else 'begin'} {tokens}"
                    if tokens
                    else f", at {most} tokens"
                )
    if name == "responses":
        for side, step in zip("AB", (a, b), strict=True):
            yield from of_groups(side, step)


def of_groups(side: str, step: Step) -> Iterator[str]:
    """Yield that samples of each prompt are equal, as with one seed or greedy sampling."""
    groups: dict[bytes, list[bytes]] = {}
    for prompt, row in zip(step.ids("prompts"), step.ids("responses"), strict=False):
        groups.setdefault(bytes(prompt), []).append(bytes(row))
    several = [(len({*group}), len(group)) for group in groups.values() if len(group) > 1]
    if several and all(distinct == 1 for distinct, _ in several):
        yield f"in {side}, all samples of a prompt are equal (seed or greedy)"
    elif several and all(distinct <= size // 2 for distinct, size in several):
        yield f"in {side}, samples of a prompt come in equal pairs (seeds)"


def of_steps(a: Step, b: Step) -> Iterator[str]:
    """Yield by how many steps B's prompts are those of A's earlier or later steps."""
    for shift in (-2, -1, 1, 2):
        for mine, other, side in ((a, b, "B"), (b, a, "A")):
            number = mine.number + shift
            if number in mine.side.steps and number > 0 and other.ids("prompts"):
                earlier = Step.of(mine.side, number).ids("prompts")
                if sorted(map(bytes, earlier)) == sorted(map(bytes, other.ids("prompts"))):
                    word = "repeats" if shift < 0 else "skips"
                    yield f"{side} {word} {abs(shift)} step of prompts (resume, or another start)"


def of_schedules(a: Step, b: Step) -> Iterator[str]:
    """Yield how the learning rates of both sides follow from each other."""
    both = [step.side.steps for step in (a, b)]
    common = [n for n in sorted(both[0]) if all("lr" in side.get(n, ()) for side in both)]
    x, y = (np.array([side[n]["lr"] for n in common]) for side in both)
    if len(x) > 2:
        for side, late, early in (("B", y, x), ("A", x, y)):
            if np.ptp(x) > 0 and np.allclose(late[1:], early[:-1], rtol=1e-5, atol=0):
                yield f"{side}'s schedule of the learning rate is one step late"
                return
    if np.all(x > 0) and np.allclose(y / x, y[0] / x[0], rtol=1e-5):
        yield f"B's learning rate is A's times {y[0] / x[0]:.5g}"
    for side, rates in (("A", x), ("B", y)):
        falls = np.diff(rates) <= 0
        if rates[0] != rates[-1] and (falls.all() or (not falls.any() and len(rates) > 2)):
            words = "decays the learning rate" if falls.all() else "warms the learning rate up"
            yield f"{side} {words}: {rates[0]:.3g} to {rates[-1]:.3g}"
