"""The cause of a difference: formulas, settings, or how one side's numbers follow from the other's.

Of the settings that give a side's numbers (`probes.py`), those are named that do not give the other
side's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch

from trainer.tools.bisect.probes import COEFFICIENTS, FORMULAS, PROBES, Settings, formulas_of
from trainer.tools.bisect.sides import IDS, STAGES, Step
from trainer.tools.bisect.walk import Finding, Pair, pair_of

Cause = dict[str, str]
Array = np.ndarray
UNKNOWN = "something else"
OTHERWISE = {"log-probs": " (a pass of its own, with dropout or other weights or precision)"}
MAX_UNKNOWN = 5
"""Differing settings that are named although none is known to act in the stage."""
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "log_probs")
NEAR = ("prompts", "order", "samples", "learning rate")
"""Stages whose relations are named next to settings."""


def causes_of(finding: Finding, steps: Pair) -> list[Cause]:
    """Return the causes of the difference, the most certain first; empty if none is known."""
    name = finding.name
    if finding.stage == "samples":
        name = next((n for n in LOG_PROBS if all(n in s.arrays for s in steps)), name)
    causes = [*formula_causes(name, steps)]
    settings = [*setting_causes(finding)]
    is_known = bool(causes) and UNKNOWN not in causes[0]["sentence"]
    if not is_known or len(settings) == 1:
        causes += settings
    if not is_known or finding.stage in NEAR:
        sentences = [*explain_relations(finding.name, *steps)]
        causes += [{"probe": "relation", "sentence": x, "setting": ""} for x in sentences]
    return list({cause["sentence"]: cause for cause in causes}.values())


def formula_causes(name: str, steps: Pair) -> Iterator[Cause]:
    """Yield the settings with which a formula gives each side's numbers, if they differ."""
    of_a, of_b = formulas_of(name, steps)
    if not of_a and not of_b:
        return
    pairs = product(of_a or [{}], of_b or [{}])
    a, b = min(pairs, key=lambda pair: len(dict(pair[0].items() ^ pair[1].items())))
    words = [described(name, steps[0], a, b), described(name, steps[1], b, a)]
    unknown = f"{UNKNOWN}{OTHERWISE.get(FORMULAS[name][1], '')}"
    computed = [f"with {x}" if x else unknown for x in words]
    sentence = f"A computes {computed[0]}; B computes {computed[1]}"
    setting = " | ".join(filter(None, words))
    yield {"probe": f"formula of {name}", "sentence": sentence, "setting": setting}


def described(name: str, step: Step, settings: Settings, other: Settings) -> str:
    """Return the settings that the other side or, if it is unknown, the default does not have."""
    if not settings:
        return ""
    probes = PROBES[FORMULAS[name][1]]
    other = other or {probe.argument: probe.choices(step)[0] for probe in probes}
    special = [p for p in probes if settings[p.argument] != other[p.argument]] or probes[:1]
    words = [probe.describe(settings[probe.argument]) for probe in special]
    if settings.get("coefficient") != other.get("coefficient"):
        words.append(f"{COEFFICIENTS[name]}={settings.get('coefficient', 0)}")
    return " ".join(words)


def setting_causes(finding: Finding) -> Iterator[Cause]:
    """Yield the settings that act in this stage and differ."""
    stage = "prompts" if finding.stage == "order" else finding.stage
    names = [x for s in STAGES if s["stage"] == stage for row in s["settings"] for x in row.split()]
    keys = [key for name in names for key in finding.settings if key.startswith(name)]
    if not keys and len(finding.settings) <= MAX_UNKNOWN:
        keys = [*finding.settings]
    keys += [key for key in finding.settings if key.startswith(("version of ", "model's "))]
    for key in dict.fromkeys(keys):
        x, y = finding.settings[key]
        sentence = f"{key} is {x!r} in A and {y!r} in B"
        yield {"probe": "setting", "sentence": sentence, "setting": key}


# ----------------------------------------------------------------------------------- relations


def explain_relations(name: str, a: Step, b: Step) -> Iterator[str]:
    """Yield sentences about how one side's numbers follow from the other's."""
    values = pair_of(name, a, b)
    if name == "lr":
        yield from explain_rates(*rates_of(a, b))
    elif name in SAMPLED and values is not None:
        yield from explain_rows(name, *values[:2])
        for side, step, other in (("A", a, b), ("B", b, a)):
            of_side = (
                explain_steps(step, other) if name == "prompts" else explain_samples(step, other)
            )
            yield from (f"{side} {words}" for words in (*of_side, *explain_cuts(name, step, other)))
    elif values is not None and values[0].shape == values[1].shape:
        yield from explain_numbers(*values, a)


def shifted(x: Array, lengths: Array, by: int) -> Array:
    """Return the numbers by some tokens later, with NaN where there is none."""
    source = np.arange(x.shape[-1]) - by
    inside = (source >= 0) & (source < lengths)
    return np.where(inside & (x.ndim == 2), np.roll(x, by, axis=-1), np.nan)


Terms = Callable[[Array, Array, Array], list[Array]]
RELATIONS: dict[str, Terms] = {
    "rounded to bfloat16": lambda x, y, n: [torch.from_numpy(x).bfloat16().double().numpy()],
    "rounded to float16": lambda x, y, n: [x.astype(np.float16).astype(float)],
    "one token later": lambda x, y, n: [shifted(x, n, 1)],
    "one token earlier": lambda x, y, n: [shifted(x, n, -1)],
    "times {:.5g}": lambda x, y, n: [0 * x, x],
    "plus {:.5g}": lambda x, y, n: [x, x**0],
    "times {:.5g} plus {:.5g}": lambda x, y, n: [0 * x, x, x**0],
    "plus {:.4g} per token of the response plus {:.4g}": lambda x, y, n: [x, n, x**0],
    "clipped to the range of these": lambda x, y, n: [x.clip(y.min(), y.max())],
}
"""Words -> terms of (a side's numbers, the other's, lengths): one, and multiples of the others."""


def related(x: Array, y: Array, lengths: Array, wrong: Array) -> Iterator[str]:
    """Yield how the numbers y follow from x, where they differ."""
    for words, terms in RELATIONS.items():
        base, *units = (np.broadcast_to(z, x.shape)[wrong] for z in terms(x, y, lengths))
        known = ~np.isnan(base)
        gap, design = (
            (y[wrong] - base)[known],
            np.array(units).T.reshape(len(base), len(units))[known],
        )
        factors, _, rank, _ = np.linalg.lstsq(design, gap, rcond=None)
        are_enough = len(gap) > max(len(units), 1) and rank == len(units)
        if len(gap) == len(units) == 1:  # a single number, such as a loss: by a count of something
            are_enough = close(max(factors[0], 1 / factors[0]) % 1, 0.0, 1e-3)
        if are_enough and np.all(abs(factors) > 1e-9) and close(design @ factors, gap):
            yield words.format(*factors)
            return


def explain_numbers(x: Array, y: Array, names: list[str], step: Step) -> Iterator[str]:
    """Yield how one side's numbers follow from the other's, and where they differ."""
    lengths, token = np.ones(x.shape) if names else step.lengths, np.arange(x.shape[-1])
    wrong = ~np.isclose(x, y, rtol=1e-5, atol=1e-6)
    if x.ndim == 2:
        lengths = lengths[:, None]
        wrong &= token < lengths
    for side, p, q in (("B", x, y), ("A", y, x)):
        words = next(related(p, q, lengths, wrong), "")
        if words:
            yield f"{side} has the other's numbers {words}"
            break
    if names:
        absent = [name for name, p, q in zip(names, x, y, strict=True) if p and not q]
        if absent:
            yield f"B has 0 for {', '.join(absent[:3])}: not trained there"
        return
    rows = wrong if x.ndim == 1 else wrong.any(1)
    truncated = step.arrays.get("truncated", np.zeros(len(x))) != 0
    places = {"in truncated rows": truncated, f"in row {int(rows.argmax())}": np.cumsum(rows) == 1}
    if x.ndim == 2:
        places = {words: rows[:, None] for words, rows in places.items()}
        places["at the last token of responses (end token)"] = token == lengths - 1
        places["at the first token of responses"] = token == 0
    for words, place in places.items():
        if len(x) > 1 and not (wrong & ~place).any():
            yield f"B's numbers differ only {words}" + " and are 0 there" * (not y[wrong].any())
    yield from explain_rows("numbers", x, y)


def close(x: Any, y: Any, rtol: float = 1e-5) -> bool:
    return bool(np.allclose(x, y, rtol=rtol, atol=1e-6))


SAMPLED = (*IDS, "policy_version", "seeds")


def explain_rows(name: str, x: Array, y: Array) -> Iterator[str]:
    """Yield that B has rows of A, in another order or number."""
    a, b = ([row.tobytes() for row in z.reshape(len(z), -1)] for z in (x, y))
    if sorted(a) == sorted(b):
        yield f"B has the same {name} in another order (shuffling, data.shuffle)"
    elif name in IDS and {*a} == {*b}:
        yield f"B has the same {name}, repeated another number of times"
    elif name in IDS and len(b) < len(a) and {*b} < {*a}:
        yield f"B lacks {len(a) - len(b)} of A's {len(a)} rows"


def explain_cuts(name: str, step: Step, other: Step) -> Iterator[str]:
    """Yield where a side cuts the other's tokens."""
    rows = zip(step.ids(name), other.ids(name), strict=False)
    pairs = [(x, y) for x, y in rows if not np.array_equal(x, y)]
    for end, part in (("end", slice(None)), ("left", slice(None, None, -1))):
        cut = [(x[part], y[part]) for x, y in pairs]
        if pairs and all(len(x) < len(y) and (x == y[: len(x)]).all() for x, y in cut):
            absent = {tuple(y[len(x) :].tolist()) for x, y in cut}
            single = len(absent) == 1 == len(min(absent))
            words = f"token {min(absent)[0]}" if single else f"at {max(len(x) for x, _ in cut)}"
            yield f"cuts {name} at the {end}: {words}" + " tokens" * (not single)


def explain_samples(step: Step, other: Step) -> Iterator[str]:
    """Yield that samples of a prompt are equal, or were drawn with older weights."""
    groups: dict[bytes, list[bytes]] = {}
    for prompt, row in zip(step.ids("prompts"), step.ids("responses"), strict=False):
        groups.setdefault(bytes(prompt), []).append(bytes(row))
    counts = np.array([[len({*rows}), len(rows)] for rows in groups.values() if len(rows) > 1])
    if len(counts) and (counts[:, 0] <= counts[:, 1] / 2).all():
        distinct, total = counts.sum(0)
        yield f"has {distinct} different samples among {total} of the same prompts (seeds, greedy)"
    seeds = step.arrays.get("seeds", np.arange(2))
    if len(np.unique(seeds)) < len(seeds):
        yield f"has {len(np.unique(seeds))} seeds for {len(seeds)} samples"
    versions = [s.arrays.get("policy_version", np.zeros(1)).max() for s in (step, other)]
    if versions[0] < versions[1]:
        yield f"samples with stale weights: version {versions[0]:g} instead of {versions[1]:g}"


def explain_steps(step: Step, other: Step) -> Iterator[str]:
    """Yield that a side's prompts are those of an earlier or later step of the other."""
    prompts = sorted(map(bytes, step.ids("prompts")))
    for shift in (-2, -1, 1, 2):
        if step.number + shift in other.side.steps:
            earlier = Step.of(other.side, step.number + shift).ids("prompts")
            if prompts and sorted(map(bytes, earlier)) == prompts:
                word = "repeats" if shift < 0 else "skips"
                yield f"{word} {abs(shift)} step of prompts (resume, or another start)"


def rates_of(*steps: Step) -> list[Array]:
    """Return both sides' learning rates in all common steps."""
    both = [step.side.steps for step in steps]
    common = [n for n in sorted(both[0]) if all("lr" in side.get(n, ()) for side in both)]
    return [np.array([side[n]["lr"] for n in common]) for side in both]


def explain_rates(x: Array, y: Array) -> Iterator[str]:
    """Yield how the learning rates of both sides follow from each other."""
    for side, late, early in (("B", y, x), ("A", x, y)):
        if len(x) > 2 and np.ptp(early) > 0 and np.allclose(late[1:], early[:-1], 1e-5, 0):
            yield f"{side}'s schedule of the learning rate is one step late"
            return
    if np.all(x > 0) and np.allclose(y / x, y[0] / x[0], rtol=1e-5):
        yield f"B's learning rate is A's times {y[0] / x[0]:.5g}"
    for side, rates in (("A", x), ("B", y)):
        falls = np.diff(rates) <= 0
        if rates[0] != rates[-1] and (falls.all() or (not falls.any() and len(rates) > 2)):
            words = "decays the learning rate" if falls.all() else "warms the learning rate up"
            yield f"{side} {words}: {rates[0]:.3g} to {rates[-1]:.3g}"
