"""Turn a peer's log of the job of `job.sh` into our row and JSON; the peers' scripts call this.

    python benchmarks/peers/record.py rows OUT                     prompts for peers without parquet
    python benchmarks/peers/record.py verl|openrlhf|trl LOG OUT    the row, and the JSON into OUT

Environment variables define the job. This script runs in the peer's Python, without verl-like.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[number]) for number in (1, 2)]

from job_record import Job, JobStep, check_steps, job_record, table

from verl_like.errors import ConfigError

NUMBER = re.compile(r"'([\w/]+)': (-?\d[\d.e+-]*)")
"""A number in the dictionary that OpenRLHF prints."""


def job_of(environment: Mapping[str, str]) -> Job:
    """Return the job of `job.sh`."""
    number = {name: int(value) for name, value in environment.items() if value.isdecimal()}
    return Job(
        model=environment["MODEL"],
        device=environment["DEVICE"],
        num_devices=number["GPUS"],
        prompts_per_step=number["BATCH"],
        samples_per_prompt=number["SAMPLES"],
        prompts_per_update=number["MINI_BATCH"],
        max_prompt_length=number["MAX_PROMPT"],
        max_response_length=number["MAX_RESPONSE"],
        epochs=number["EPOCHS"],
        steps=number["STEPS"],
    )


def steps_of_verl(log: str, job: Job) -> list[JobStep]:
    """Read the steps from the lines of verl's `file` logger."""
    steps, before = [], "timing_s/"
    for line in map(json.loads, log.splitlines()):
        data = line["data"]
        if "timing_s/step" not in data:
            continue  # the line of a validation
        times = {name[len(before) :]: data[name] for name in data if name.startswith(before)}
        seconds = times.pop("step")
        steps.append(
            JobStep(line["step"], seconds, tokens(data["response_length/mean"], job), times)
        )
    return steps


def steps_of_openrlhf(log: str, job: Job) -> list[JobStep]:
    """Read the steps from OpenRLHF's log, which has one line per step."""
    steps, before = [], "timing/"
    for number, printed in re.findall(r"Global step (\d+): (\{.*\})", log):
        data = {name: float(value) for name, value in NUMBER.findall(printed)}
        times = {name[len(before) :]: data[name] for name in data if name.startswith(before)}
        seconds = times.pop("step_total")
        drawn = tokens(data["rollout/response_length_mean"], job)
        steps.append(JobStep(int(number), seconds, drawn, times))
    return steps


def steps_of_trl(log: str, job: Job) -> list[JobStep]:
    """Read the steps that `trl_job.py` wrote."""
    return [JobStep(**json.loads(line), phases={}) for line in log.splitlines()]


def tokens(mean_length: float, job: Job) -> float:
    """Return the response tokens of a step."""
    return mean_length * job.prompts_per_step * job.samples_per_prompt


STEPS: Mapping[str, Callable[[str, Job], list[JobStep]]] = {
    "verl": steps_of_verl,
    "openrlhf": steps_of_openrlhf,
    "trl": steps_of_trl,
}


def flat_rows(prompts: str, num_rows: int) -> list[dict[str, Any]]:
    """Return messages and ground truths; a short file is repeated from its first row."""
    import pyarrow.parquet as pq

    rows = pq.read_table(prompts, columns=["prompt", "reward_model"]).to_pylist()
    if not rows:
        raise ConfigError(f"PROMPTS={prompts} has 0 rows, and the job takes {num_rows}.")
    flat = [
        {"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]}
        for row in rows
    ]
    return list(islice(cycle(flat), num_rows))


def main() -> None:
    """Parse the command line, and run the benchmark."""
    command, *files = sys.argv[1:]
    job = job_of(os.environ)
    try:
        check_steps(job.steps)
        if command == "rows":
            rows = flat_rows(os.environ["PROMPTS"], job.prompts_per_step * job.steps)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            Path(files[0]).write_text(text, encoding="utf-8")
            return
        try:
            steps = STEPS[command](Path(files[0]).read_text(encoding="utf-8"), job)
        except KeyError as missing:
            raise ConfigError(
                f"{files[0]}: a step has no {missing}. {command} is of a version that writes its "
                "steps down otherwise; the head of its script names those that are read."
            ) from missing
        command = Path(files[1]).with_name("command.txt").read_text(encoding="utf-8")
        record = job_record(command, job, steps, command=command.strip())
    except ConfigError as err:
        sys.exit(f"error: {err}")
    Path(files[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("", *table(record), "", f"all results: {files[1]}", sep="\n")


if __name__ == "__main__":
    main()
