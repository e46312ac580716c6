"""Read a run folder for the report, whether the run is complete, in progress or failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.run_folder.accounts import read_ledger
from trainer.run_folder.folder import CHANGES_FILE
from trainer.run_folder.metrics import (
    MetricLines,
    is_number,
    read_lines,
    read_metrics,
    series,
    spread,
)
from trainer.tools.report.calls import AFTER_STEP, TracedCall, read_timeline
from trainer.tools.report.thumbnails import Thumbnail, Thumbnails
from trainer.tools.report.trajectories import (
    TRAJECTORIES_PER_STEP,
    ShownTrajectory,
    outcomes_by_turns,
    shorten,
    trajectory_of,
)
from verl_like.errors import ConfigError
from verl_like.files import json_objects

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
        by_turns=outcomes_by_turns(
            row for path in _sample_files(folder / "rollouts")[-1:] for row in json_objects(path)[0]
        ),
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
    for row in spread(rows, SHOWN_STARTS):
        versions = row.get("versions")
        named = versions.items() if isinstance(versions, dict) else ()
        shown = ", ".join(f"{name} {version}" for name, version in named)
        time, host, command = (_shorten(row.get(name, "")) for name in ("time", "host", "command"))
        starts.append(RunStart(time, host, command, shown))
    return starts


def _read_samples(folder: Path, notes: list[str]) -> list[ShownSample]:
    """Return samples of some steps, first and last included, with the best and worst of each."""
    samples = []
    thumbnails = Thumbnails()
    for path in spread(_sample_files(folder), SAMPLED_STEPS):
        rows = read_lines(path, notes)
        rows.sort(key=_score_of, reverse=True)
        has_turns = any("turns" in row for row in rows)
        for row in spread(rows, TRAJECTORIES_PER_STEP if has_turns else SAMPLES_PER_STEP):
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
        shown = spread(both, COMPARED_PROMPTS)
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
