"""The jobs of `--multirun`: one that fails does not end the others.

sweep = Sweep()
with sweep.job(["trainer.seed=1"]) as job:      # for each job, whatever becomes of it
    job.folder = ...
sweep.close()                                 # which failed, and the runs side by side
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.compare.page import PAGE, write_comparison
from trainer.compare.runs import read_runs
from trainer.compare.tables import comparison_text
from trainer.run_folder.signals import STOP_EXITS
from verl_like.terminal import draw_table, fit, terminal_width


@dataclass
class Job:
    """One run of a sweep."""

    overrides: Sequence[str]
    """All of them, its own and those of every job."""
    folder: Path | None = None
    failure: str = ""
    """The last line of its error; empty if there was none."""


class Sweep:
    """The jobs so far."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    @contextmanager
    def job(self, overrides: Sequence[str]) -> Iterator[Job]:
        """Within, a job runs; an error that it exits with is noted. A signal to stop ends all."""
        job = Job(overrides)
        try:
            yield job
        except SystemExit as ended:
            if ended.code in STOP_EXITS:
                raise
            job.failure = str(ended.code) if ended.code else ""
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            elif job.failure:
                job.failure = "its traceback is above"
        self.jobs.append(job)

    def close(self) -> None:
        """Print what became of the jobs, and compare those that trained; exit 1 if one failed."""
        failed = [job for job in self.jobs if job.failure]
        width = terminal_width()
        if failed:
            rows = [["job", "outcome"]]
            rows += [[self._own(job), job.failure or "no failure"] for job in self.jobs]
            print("", *draw_table(rows, width), sep="\n")

        folders = [job.folder for job in self.jobs if job.folder is not None]
        trained = [folder for folder in folders if (folder / "metrics.jsonl").is_file()]
        if len(trained) > 1:
            runs = read_runs(trained)
            page = write_comparison(runs, trained[0].parent / PAGE)
            print("", comparison_text(runs, width), "", f"comparison: {page}", sep="\n", flush=True)
        if failed:
            text = f"error: {len(failed)} of {len(self.jobs)} jobs failed"
            sys.exit(fit(text, width))

    def _own(self, job: Job) -> str:
        """What tells the job from the others."""
        shared = set.intersection(*(set(each.overrides) for each in self.jobs))
        return " ".join(override for override in job.overrides if override not in shared)
