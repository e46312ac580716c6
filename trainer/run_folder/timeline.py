"""`timeline.json`: the calls of every worker over time, for Perfetto or chrome://tracing.

The trainer passes the calls of every step, each with its stage. The file is valid JSON after every
step, and a resumed run continues it. The same calls yield `timing_s/...` and the overlap ratios of
a step.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from verl_like.files import parse_json

logger = logging.getLogger(__name__)
_TAIL = b"\n]}\n"
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
"""Whole microseconds and no blanks, because a run has many thousands of these lines."""
EVENT_FIELDS = ("cpu_s", "step", "stage", "busy_s", "num_answers")
"""Fields of a call in its event, besides time, method and lane."""
LANE_FIELDS = ("role", "rank", "pid")
"""Fields of a lane in the event that names it. Here `pid` is the worker's process; elsewhere
in a trace it is a pool."""

Event = dict[str, Any]
Record = Mapping[str, Any]
"""A call: role, method, rank, pid (of the worker), start, end (seconds of one clock), cpu_s, pool.
"""


class Timeline:
    """The trace file: a lane group per pool, a lane per role and rank, and its calls.

    Fields that all calls of a lane share are written once, with the lane's name.
    """

    def __init__(self, path: str | Path, resume: bool = False, stages: Sequence[str] = ()) -> None:
        """Begin the file, or continue an existing one.

        `stages` are the names of a step's stages, for readers of the run folder.
        """
        self.path = Path(path)
        self._pools: dict[str, int] = {}
        self._lanes: dict[tuple[int, str], Event] = {}
        """A pool's number and a lane's name -> the event that names the lane."""
        self._is_empty = True
        if not (resume and self.path.is_file() and self._can_continue()):
            header = json.dumps({"displayTimeUnit": "ms", "otherData": {"stages": list(stages)}})
            self.path.write_bytes(header[:-1].encode() + b', "traceEvents": [' + _TAIL)

    def add(self, records: Iterable[Record]) -> None:
        ordered = sorted(records, key=lambda record: float(record["start"]))
        events = [event for record in ordered for event in self._events(record)]
        if not events:
            return
        lines = ",\n".join(map(_ENCODE, events)).encode()
        with self.path.open("r+b") as file:
            file.seek(-len(_TAIL), 2)
            file.write((b"\n" if self._is_empty else b",\n") + lines + _TAIL)
        self._is_empty = False

    def _events(self, record: Record) -> list[Event]:
        """Return the call's event, preceded by events that name a new pool or lane.

        A lane is named again when another process continues it.
        """
        events: list[Event] = []
        pool, name = record["pool"], f"{record['role']}-{record['rank']}"
        if pool not in self._pools:
            pid = self._pools[pool] = len(self._pools) + 1
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": pool}})
        pid = self._pools[pool]

        known = self._lanes.get((pid, name), {"tid": len(self._lanes) + 1})
        lane = {"pid": pid, "tid": known["tid"]}
        fields = {name: record[name] for name in LANE_FIELDS if name in record}
        named = {"ph": "M", "name": "thread_name", **lane, "args": {"name": name, **fields}}
        if named != known:
            self._lanes[pid, name] = named
            events.append(named)

        start, seconds = record["start"], record["end"] - record["start"]
        times = {"ts": round(start * 1e6), "dur": round(seconds * 1e6)}
        args = {name: record[name] for name in EVENT_FIELDS if name in record}
        if "cpu_s" in args:
            args["cpu_s"] = round(args["cpu_s"], 4)
        return [*events, {"ph": "X", "name": record["method"], **lane, **times, "args": args}]

    def _can_continue(self) -> bool:
        """Return whether the file can be continued; a damaged file is set aside."""
        try:
            self._read_names()
        except (ValueError, KeyError, TypeError) as error:
            aside = self.path.with_name(self.path.name + ".damaged")
            self.path.replace(aside)
            logger.warning(
                "%s is damaged (%s: %s): kept as %s, and a new file is started.",
                *(self.path, type(error).__name__, error, aside.name),
            )
            self._pools, self._lanes, self._is_empty = {}, {}, True
            return False
        return True

    def _read_names(self) -> None:
        """Read the pools and lanes of an existing file, without its calls."""
        last = b""
        with self.path.open("rb") as file:
            if parse_json(file.readline() + b"]}")["traceEvents"]:
                raise ValueError("its first line is not the first line of a run's timeline")
            for last in file:
                if not last.startswith(b'{"ph":"M"'):
                    continue
                event, self._is_empty = parse_json(last.rstrip(b",\n")), False
                if event["name"] == "process_name":
                    self._pools[event["args"]["name"]] = event["pid"]
                else:
                    self._lanes[event["pid"], event["args"]["name"]] = event
        if last != _TAIL[1:]:
            raise ValueError("the end of the file is missing")


def call_timings(
    records: Iterable[Record],
    stages: Mapping[str, float],
    concurrent: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Return `timing_s/...` of a step's stages and calls, and how much the calls overlapped.

    A method's time is the time in which at least one rank was running it. Its name is the method's,
    or its entry in `labels`. If a method has a stage's name, the stage's time counts.

    `perf/overlap_ratio` covers the stages `concurrent`. It is the sum of the times in which roles
    were busy, divided by the wall time from the first start to the last end: 1 if they took turns,
    2 if two of them ran at the same time throughout. `perf/overlap_ratio_<stage>` is the ratio of
    one stage.
    """
    records = list(records)
    seconds = call_seconds(records, labels) | dict(stages)
    timings = {f"timing_s/{name}": value for name, value in seconds.items()}

    busy = wall = 0.0
    for stage in concurrent:
        calls = [record for record in records if record.get("stage") == stage]
        if not calls:
            continue
        stage_s = max(c["end"] for c in calls) - min(c["start"] for c in calls)
        stage_busy = sum(_busy_seconds(calls, "role", "method").values())
        timings[f"perf/overlap_ratio_{stage}"] = stage_busy / stage_s
        busy, wall = busy + stage_busy, wall + stage_s
    if wall:
        timings["perf/overlap_ratio"] = busy / wall
    return timings


def call_seconds(
    records: Iterable[Record], labels: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Return the seconds in which at least one rank was running each method, by name or label."""
    busy = _busy_seconds(records, "method")
    return {(labels or {}).get(method, method): seconds for method, seconds in busy.items()}


def _busy_seconds(records: Iterable[Record], *keys: str) -> dict[Any, float]:
    """Return the seconds in which at least one call was running, by the values of `keys`."""
    busy: dict[Any, float] = defaultdict(float)
    ended: dict[Any, float] = {}
    key_of = itemgetter(*keys)
    for record in sorted(records, key=itemgetter("start")):
        key, start = key_of(record), record["start"]
        until = ended.get(key, start)
        busy[key] += max(record["end"] - max(start, until), 0.0)
        ended[key] = max(record["end"], until)
    return dict(busy)
