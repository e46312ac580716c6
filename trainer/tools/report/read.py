"""Read a run folder for the report: its numbers, the calls of workers, and its images, small.

The run may be complete, in progress or failed.

A run folder may come from someone else, so its sample files must not make the page contain other
files of yours. A file is shown only if it has the recorded hash, which an author who does not have
the file cannot know, and if PIL decodes it. Anything else has a placeholder.
"""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.run_folder.accounts import read_ledger
from trainer.run_folder.folder import CHANGES_FILE
from trainer.run_folder.metrics import (
    MetricLines,
    evenly_spaced,
    is_number,
    read_lines,
    read_metrics,
    series,
)
from trainer.tools.report.trajectories import (
    TRAJECTORIES_PER_STEP,
    ShownTrajectory,
    outcomes_by_turns,
    shorten,
    trajectory_of,
)
from verl_like.errors import ConfigError
from verl_like.files import json_objects, parse_json

FAILURE_FILE = "failure.txt"
STOPPED = "Stopped by "
"""Beginning of the failure text of a run that was stopped by a signal."""
SAMPLED_STEPS, SAMPLES_PER_STEP, LONGEST_TEXT = 12, 16, 1500
SHOWN_STARTS, COMPARED_PROMPTS = 5, 6
OLD_STAGES = {"gen": "sample", "adv": "estimate", "update_weights": "sync"}
"""Names of PPO's stages in folders of earlier runs, and their names today."""
WRITTEN_FIELDS = (
    "step", "uid", "sample", "data_source", "input", "output", "gts", "score", "turns", "ended",
    "problem", "columns", "images",
)  # fmt: skip
"""The known fields of a sample's line; other fields come from rewards."""


@dataclass(frozen=True)
class ShownSample:
    """A response with its prompt and reward."""

    step: int
    score: float
    prompt: str
    response: str
    truth: str
    parts: str = ""
    """The values that rewards returned besides the score, by name."""
    trajectory: ShownTrajectory | None = None
    """The sample's turns, if it has several."""
    images: Sequence[Thumbnail] = ()
    """The images of the prompt."""


@dataclass(frozen=True)
class RunStart:
    """A start or a resume of the run."""

    time: str
    host: str
    command: str
    versions: str
    package: str = ""
    """The version of this package."""
    commit: str | None = None
    """The commit of the folder in which it started; "" without one, None if it is unknown."""
    rows: int | None = None
    """The number of rows to train on."""


@dataclass(frozen=True)
class ConfigChange:
    """The keys that a resumed run changed, after a step."""

    step: int
    keys: Mapping[str, Sequence[Any]]
    """Key -> its value before and after."""


@dataclass(frozen=True)
class RunData:
    """All data of the report; `notes` lists what could not be read."""

    folder: Path
    metrics: MetricLines
    calls: Sequence[TracedCall]
    stages: Sequence[str]
    placement: Sequence[Sequence[str]]
    samples: Sequence[ShownSample]
    failure: str
    notes: Sequence[str]
    ledger: Sequence[Sequence[str]] = ()
    """Cells of the table of the generators' samples; empty without generators."""
    validated: Sequence[ShownSample] = ()
    by_turns: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """For the last step's trajectories: number of turns -> outcome -> count."""
    starts: Sequence[RunStart] = ()
    config: str = ""
    """The text of `config.yaml`."""
    data_sources: Sequence[str] = ()
    """The data sources of the last step's samples."""
    changes: Sequence[ConfigChange] = ()
    compared: Sequence[tuple[ShownSample, ShownSample]] = ()
    """The first and the last sample of the same prompts."""

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return (steps, values) of a metric, from the lines that have it."""
        return series(self.metrics, name)


def read_run(folder: str | Path) -> RunData:
    """Read the run in `folder`; if it is not a run folder, raise and name run folders in it."""
    folder = Path(folder)
    if not (folder / "metrics.jsonl").is_file() and not (folder / "timeline.json").is_file():
        hint = " Use a run folder: the trainer.default_local_dir of a run."
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder.{hint}")
        near = sorted(str(path.parent) for path in folder.glob("**/metrics.jsonl"))
        if near:
            hint = f" Run folders in it: {', '.join(near[:5])}."
        raise ConfigError(f"{folder} has no metrics.jsonl and no timeline.json.{hint}")

    notes: list[str] = []
    # the printed placement: a heading, then a row for each pool
    placement = [line.strip() for line in _read_text(folder / "placement.txt").splitlines()]
    calls, stages = read_timeline(folder / "timeline.json", notes)
    metrics = read_metrics(folder / "metrics.jsonl", notes)
    if "gen" in stages:
        stages = [OLD_STAGES.get(stage, stage) for stage in stages]
        metrics = [_with_new_names(line) for line in metrics]
    last_rows = [
        row for path in _sample_files(folder / "rollouts")[-1:] for row in json_objects(path)[0]
    ]
    return RunData(
        folder=folder,
        metrics=metrics,
        calls=calls,
        stages=stages,
        placement=[re.split(r"\s{2,}", line) for line in placement if line],
        samples=_read_samples(folder / "rollouts", notes),
        validated=_read_samples(folder / "validation", notes),
        starts=_read_starts(folder / "starts.jsonl", notes),
        config=_read_text(folder / "config.yaml"),
        changes=[
            ConfigChange(int(row["step"]), row["keys"])
            for row in json_objects(folder / CHANGES_FILE)[0]
        ],
        compared=_first_and_last(folder, notes),
        failure=_read_text(folder / FAILURE_FILE),
        notes=notes,
        ledger=read_ledger(folder, notes),
        by_turns=outcomes_by_turns(last_rows),
        data_sources=sorted({str(row["data_source"]) for row in last_rows if "data_source" in row}),
    )


def _with_new_names(line: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics with the times of old stages under their new names.

    A line that a newer version appended on a resume has the new names already.
    """
    if "timing_s/sample" in line:
        return dict(line)
    names = {f"timing_s/{old}": f"timing_s/{new}" for old, new in OLD_STAGES.items()}
    return {names.get(name, name): value for name, value in line.items()}


def _read_text(path: Path) -> str:
    """Return the text of a file, or "" if it does not exist."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_starts(path: Path, notes: list[str]) -> list[RunStart]:
    """Return the first and the last starts of the run, if they were recorded."""
    rows = read_lines(path, notes) if path.is_file() else []
    starts = []
    for row in evenly_spaced(rows, SHOWN_STARTS):
        versions = row.get("versions")
        named = versions.items() if isinstance(versions, dict) else ()
        shown = ", ".join(f"{name} {version}" for name, version in named)
        time, host, command = (_shorten(row.get(name, "")) for name in ("time", "host", "command"))
        version = dict(named).get("verl-like")
        package = f"verl-like {version}" if version else ""
        commit, num_rows = row.get("commit"), row.get("rows")
        start = RunStart(time, host, command, shown, package)
        if isinstance(commit, str) and type(num_rows) in (int, type(None)):
            start = replace(start, commit=_shorten(commit), rows=num_rows)
        starts.append(start)
    return starts


def _read_samples(folder: Path, notes: list[str]) -> list[ShownSample]:
    """Return samples of some steps, first and last included, with the best and worst of each."""
    samples = []
    thumbnails = Thumbnails()
    for path in evenly_spaced(_sample_files(folder), SAMPLED_STEPS):
        rows = read_lines(path, notes)
        rows.sort(key=_score_of, reverse=True)
        has_turns = any("turns" in row for row in rows)
        for row in evenly_spaced(rows, TRAJECTORIES_PER_STEP if has_turns else SAMPLES_PER_STEP):
            trajectory = trajectory_of(row) if has_turns else None
            images = thumbnails.of(row["images"]) if "images" in row else ()
            sample = _shown(row, int(path.stem))
            samples.append(replace(sample, trajectory=trajectory, images=images))
    return samples


def _first_and_last(folder: Path, notes: list[str]) -> list[tuple[ShownSample, ShownSample]]:
    """Return the first and the last sample of prompts that were sampled twice, if there are any.

    The samples are those of the first and the last validation, or of the first and the last step.
    """
    for name in ("validation", "rollouts"):
        files = _sample_files(folder / name)
        if len(files) < 2:
            continue
        first, last = (
            {str(row.get("input", "")): row for row in read_lines(path, notes)}
            for path in (files[0], files[-1])
        )
        both = [prompt for prompt in first if prompt in last]
        shown = evenly_spaced(both, COMPARED_PROMPTS)
        if shown:
            steps = int(files[0].stem), int(files[-1].stem)
            return [(_shown(first[p], steps[0]), _shown(last[p], steps[1])) for p in shown]
    return []


def _shown(row: Mapping[str, Any], step: int) -> ShownSample:
    """Return a sample without its turns and images."""
    return ShownSample(
        step=step,
        score=_score_of(row),
        prompt=_shorten(row.get("input", "")),
        response=_shorten(row.get("output", "")),
        truth=_shorten(_truth(row)),
        parts=_shorten(", ".join(_parts(row))),
    )


def _score_of(row: Mapping[str, Any]) -> float:
    return float(row["score"]) if is_number(row.get("score")) else 0.0


def _sample_files(folder: Path) -> list[Path]:
    """Return a file for each step, in their order."""
    files = (path for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    return sorted(files, key=lambda path: int(path.stem))


def _truth(row: Mapping[str, Any]) -> Any:
    """Return the ground truth of a sample, followed by the columns that rewards read, if any."""
    truth, columns = row.get("gts", ""), row.get("columns")
    if not isinstance(columns, dict) or not columns:
        return truth
    texts = [] if truth in (None, "") else [str(truth)]
    return "\n".join([*texts, *(f"{name}: {value}" for name, value in columns.items())])


def _parts(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield each value that a reward returned, with its name."""
    for name, value in row.items():
        if name not in WRITTEN_FIELDS and value is not None:
            yield f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def _shorten(text: Any) -> str:
    return shorten(text, LONGEST_TEXT)


def phase_shares(metrics: MetricLines, stages: Sequence[str]) -> list[tuple[str, float, float]]:
    """Return (phase, seconds per step, percent of the step) over all steps.

    The part of `timing_s/step` outside its stages is `other`. The percentages, to one decimal, sum
    to 100.
    """
    timed = [line for line in metrics if line.get("timing_s/step", 0.0) > 0.0]
    if not timed:
        return []
    phases = (*stages, *AFTER_STEP)
    seconds = {phase: sum(line.get(f"timing_s/{phase}", 0.0) for line in timed) for phase in phases}
    seconds = {phase: spent for phase, spent in seconds.items() if spent > 0.0}
    after_step = sum(seconds.get(phase, 0.0) for phase in AFTER_STEP)
    total = max(sum(line["timing_s/step"] for line in timed) + after_step, sum(seconds.values()))
    seconds["other"] = total - sum(seconds.values())
    exact = {phase: 1000 * spent / total for phase, spent in seconds.items()}
    tenths = {phase: int(share) for phase, share in exact.items()}
    by_remainder = sorted(exact, key=lambda phase: tenths[phase] - exact[phase])
    for phase in by_remainder[: 1000 - sum(tenths.values())]:
        tenths[phase] += 1
    return [(phase, seconds[phase] / len(timed), tenths[phase] / 10) for phase in seconds]


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


PIXELS = 96
"""Longest side of a thumbnail."""
MAX_PER_SAMPLE, MAX_FILES = 4, 256
"""The most images of a sample, and the most files that a table of samples shows."""
MAX_BYTES = 32 * 2**20
"""Larger files are not read."""


class Thumbnail(NamedTuple):
    """A data URI, or "" if the image is not shown, and the name of its file."""

    uri: str
    name: str


class Thumbnails:
    """The thumbnails of a table of samples; each file is read once."""

    def __init__(self) -> None:
        """Begin without files."""
        self._uris: dict[tuple[str, str], str] = {}

    def of(self, images: Any) -> list[Thumbnail]:
        """Return the thumbnails of the field `images` of a sample's line."""
        if not isinstance(images, list):
            return []
        shown = []
        for image in images[:MAX_PER_SAMPLE]:
            row = image if isinstance(image, Mapping) else {}
            path, sha = str(row.get("path")), str(row.get("sha"))
            if (path, sha) not in self._uris and len(self._uris) < MAX_FILES:
                self._uris[path, sha] = _data_uri(path, sha)
            shown.append(Thumbnail(self._uris.get((path, sha), ""), Path(path).name))
        return shown


def _data_uri(path: str, sha: str) -> str:
    """Return a small copy of the image, or "" if it is missing, changed or not an image."""
    from workers.images import ImageRef, open_image

    try:
        if not Path(path).is_file() or Path(path).stat().st_size > MAX_BYTES:
            return ""  # reading a pipe or a device might not end
        image = open_image(ImageRef(path, sha, 0, 0))
    except (ConfigError, OSError):
        return ""
    image.thumbnail((PIXELS, PIXELS))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
