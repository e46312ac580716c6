"""A run of the PPO recipe, and its row for a table with other frameworks.

    python benchmarks/bench_job.py [--steps 6] [--out FILE] [key=value ...]

Runs `verl-like ppo key=value ...` without counting its first step, and prints a row: framework,
model, devices, seconds per 1,024 prompts, epochs, response tokens per second, hardware, commit. The
JSON has every step by phase and all settings. `benchmarks/peers` runs the same job with other
frameworks.

  --steps 6           number of steps, including the first one; or trainer.total_training_steps
  --out FILE          file of the JSON, by default bench.json in the run folder
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from job_record import Job, JobStep, check_steps, job_record, table

from trainer.config.devices import run_devices
from trainer.config.keys import flat_config
from trainer.config.settings import keys_of, parse
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.recipe_command import is_setting, load_or_exit, run_or_exit
from trainer.run_folder.metrics import SAMPLED
from trainer.tools.report.read import RunData, read_run
from verl_like.errors import ConfigError
from verl_like.files import write_atomic
from verl_like.masking import mask_text
from verl_like.terminal import survive_broken_pipes

STEPS = 6
"""Default number of steps: one to warm up, and five that count."""
LENGTH = "trainer.total_training_steps"
RECORD = "bench.json"


def job(arguments: Sequence[str]) -> None:
    """Run the job, print its row, and write its JSON."""
    settings = [argument for argument in arguments if is_setting(argument)]
    options = _options([argument for argument in arguments if argument not in settings])
    length = STEPS if options.steps is None else options.steps
    check_steps(length)
    survive_broken_pipes()
    defaults = [
        "trainer.save_final=false",
        "trainer.max_restarts=0",
        f"trainer.default_local_dir=runs/bench/{datetime.now():%Y%m%d-%H%M%S}",
        f"{LENGTH}={length}",
    ]
    config = load_or_exit(PPO, settings, defaults)
    _check(config, options.steps, settings)
    folder = run_or_exit(config, PPO, settings).folder

    command = mask_text(shlex.join(["python", "benchmarks/bench_job.py", *arguments]))
    record = record_of(config, read_run(folder)) | {"command": command}
    out = Path(options.out or folder / RECORD)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, json.dumps(record, indent=1) + "\n")
    print("", *table(record), "", f"all results: {out}", sep="\n", flush=True)


def record_of(config: PPOConfig, run: RunData) -> dict[str, Any]:
    """Return the record of a job from what the run has written into its folder."""
    policy, trainer = config.actor_rollout_ref, config.trainer
    job = Job(
        model=policy.model.path,
        device=run_devices(trainer).type,
        num_devices=trainer.n_gpus_per_node * trainer.nnodes,
        prompts_per_step=config.data.train_batch_size,
        samples_per_prompt=policy.rollout.n,
        prompts_per_update=policy.actor.ppo_mini_batch_size,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        epochs=policy.actor.ppo_epochs,
        steps=trainer.total_training_steps or 0,
    )
    steps = []
    for line in run.metrics:
        times = {
            stage: line[f"timing_s/{stage}"] for stage in run.stages if f"timing_s/{stage}" in line
        }
        steps.append(JobStep(int(line["step"]), line["timing_s/step"], line[SAMPLED], times))
    return job_record(
        "verl-like",
        job,
        steps,
        settings=flat_config(config),
        run=str(run.folder),
    )


def _check(config: PPOConfig, steps: int | None, settings: Sequence[str]) -> None:
    """Raise, before anything starts, if the job could not be measured."""
    trainer = config.trainer
    length = trainer.total_training_steps or 0
    if steps is not None and LENGTH in keys_of([parse(setting) for setting in settings]):
        raise ConfigError(f"--steps={steps} and {LENGTH}={length}: leave one of them out.")
    check_steps(length)
    if trainer.dry_run:
        raise ConfigError("trainer.dry_run=true: it runs no step, and a benchmark measures some.")
    if (Path(trainer.default_local_dir) / "metrics.jsonl").exists():
        raise ConfigError(
            f"trainer.default_local_dir={trainer.default_local_dir} holds a run already: a "
            "benchmark takes a folder of its own. Leave the key out for a new one in runs/bench."
        )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench_job.py", allow_abbrev=False)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", metavar="FILE")
    return parser.parse_args(arguments)


def main() -> None:
    """Parse the command line, and run the benchmark."""
    try:
        job(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
