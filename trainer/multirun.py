"""The jobs of `--multirun`: a job that fails does not end the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.compare.page import PAGE, write_comparison
from trainer.compare.runs import read_runs
from trainer.compare.tables import comparison_text
from trainer.config.schema import RunConfig
from trainer.run_folder.signals import STOP_EXITS
from verl_like.config_key import changed
from verl_like.terminal import draw_table, fit, terminal_width


def run_jobs(
    jobs: Sequence[Sequence[str]],
    load: Callable[[Sequence[str]], RunConfig],
    run: Callable[[RunConfig], object],
) -> None:
    """Load and run the settings of each job, each in its own folder below the run folder.

    An error that a job exits with is noted; a signal to stop ends all jobs. At the end the outcomes
    are printed, and the jobs that trained are compared. Exit with 1 if a job failed.
    """
    folders, failures = [], []
    for number, job in enumerate(jobs):
        failure = ""
        try:
            config = load(job)
            folders.append(Path(config.trainer.default_local_dir) / str(number))
            run(changed(config, {"trainer.default_local_dir": str(folders[-1])}))
        except SystemExit as ended:
            if ended.code in STOP_EXITS:
                raise
            failure = str(ended.code) if ended.code else ""
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            elif failure:
                failure = "its traceback is above"
        failures.append(failure)

    width, num_failed = terminal_width(), sum(map(bool, failures))
    if num_failed:
        shared = set(jobs[0]).intersection(*jobs)
        rows = [["job", "outcome"]]
        for job, failure in zip(jobs, failures, strict=True):
            settings = " ".join(setting for setting in job if setting not in shared)
            rows.append([settings, failure or "no failure"])
        print("", *draw_table(rows, width), sep="\n")

    trained = [folder for folder in folders if (folder / "metrics.jsonl").is_file()]
    if len(trained) > 1:
        runs = read_runs(trained)
        page = write_comparison(runs, trained[0].parent / PAGE)
        print("", comparison_text(runs, width), "", f"comparison: {page}", sep="\n", flush=True)
    if num_failed:
        sys.exit(fit(f"error: {num_failed} of {len(jobs)} jobs failed", width))
