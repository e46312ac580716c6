"""The calls of workers in `timeline.json`, prepared for the report's figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verl_like.files import parse_json

AFTER_STEP = ("testing", "save_checkpoint")
"""Phases outside a step's stages, which `timing_s/step` does not include."""
LONGEST_PAUSE = 0.2
"""The longest pause drawn between two steps, as a fraction of a step's mean duration."""


@dataclass(frozen=True)
class TracedCall:
    """One call on one worker, from its start to its end in seconds of the trace's clock."""

    pool: str
    lane: str
    role: str
    method: str
    start: float
    end: float
    step: int
    stage: str = ""
    """The stage of the step that the call belongs to; "" in traces without stages."""
    details: str = ""
    """Further information as text."""


def read_timeline(path: Path, notes: list[str]) -> tuple[list[TracedCall], list[str]]:
    """Return the calls of a run's Chrome trace, ordered by start, and the stages of a step."""
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
        return [], []
    try:
        trace = parse_json(path.read_bytes())
        events = trace["traceEvents"]
        pools = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        lanes = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}

        calls = []
        for e in events:
            if e["ph"] != "X":  # names of pools and lanes
                continue
            lane, args = lanes[e["pid"], e["tid"]], e.get("args", {})
            details = ""
            if "num_answers" in args:  # of environments
                busy_ms = 1000 * args["busy_s"]
                details = f", {args['num_answers']} answers in {busy_ms:.1f} ms in total"
            call = TracedCall(
                pool=pools[e["pid"]],
                lane=lane["name"],
                role=lane["role"] if "role" in lane else e["cat"],  # as in older runs
                method=e["name"],
                start=e["ts"] / 1e6,
                end=(e["ts"] + e["dur"]) / 1e6,
                step=int(args.get("step", 0)),
                stage=str(args.get("stage", "")),
                details=details,
            )
            calls.append(call)
        return sorted(calls, key=lambda call: call.start), list(trace["otherData"]["stages"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        notes.append(f"{path.name} is incomplete, or not written by a run, and is left out.")
    return [], []


def last_steps(calls: Sequence[TracedCall], count: int) -> list[TracedCall]:
    """Return the calls of the last `count` training steps, without validation and checkpoints."""
    trained = [call for call in calls if call.step > 0 and call.stage not in AFTER_STEP]
    steps = sorted({call.step for call in trained})[-count:]
    return [call for call in trained if call.step in steps]


def without_pauses(calls: Sequence[TracedCall]) -> tuple[list[TracedCall], list[float]]:
    """Return the calls with shortened pauses between steps, and the times of these pauses.

    A pause may be a validation, a checkpoint or a restart, or a driver that waits.
    """
    steps: dict[int, list[TracedCall]] = {}
    for call in sorted(calls, key=lambda call: call.step):
        steps.setdefault(call.step, []).append(call)
    spans = [(min(c.start for c in of), max(c.end for c in of)) for of in steps.values()]
    shortest = LONGEST_PAUSE * sum(end - start for start, end in spans) / max(len(spans), 1)

    shifted: list[TracedCall] = []
    cuts: list[float] = []
    shift, latest = 0.0, spans[0][0] if spans else 0.0
    for (start, end), of_step in zip(spans, steps.values(), strict=True):
        if start - latest > shortest:
            shift += start - latest - shortest
            cuts.append(start - shift - shortest / 2)
        shifted += [replace(c, start=c.start - shift, end=c.end - shift) for c in of_step]
        latest = max(latest, end)
    return sorted(shifted, key=lambda call: call.start), cuts


def pools_at_work(calls: Sequence[TracedCall]) -> list[tuple[float, float, int]]:
    """Return (start, end, number of busy pools) for every interval from the first call to the last.

    An interval lasts while the number stays the same, so there are few even for many ranks.
    """
    starts = [(call.start, 1, call.pool) for call in calls]
    ends = [(call.end, -1, call.pool) for call in calls]
    edges = sorted(starts + ends)
    running: Counter[str] = Counter()
    stretches: list[tuple[float, float, int]] = []
    for (time, change, pool), (until, _, _) in zip(edges, edges[1:], strict=False):
        running[pool] += change
        number = sum(count > 0 for count in running.values())
        if until <= time:
            continue
        if stretches and stretches[-1][1:] == (time, number):
            time = stretches.pop()[0]
        stretches.append((time, until, number))
    return stretches


def overlap_share(calls: Sequence[TracedCall]) -> float:
    """Return the fraction of the busy time in which two or more pools were busy."""
    stretches = pools_at_work(calls)
    working = sum(end - start for start, end, number in stretches if number)
    overlapping = sum(end - start for start, end, number in stretches if number > 1)
    return overlapping / working if working else 0.0
