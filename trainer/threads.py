"""The number of threads of each worker process, chosen once, when a run starts.

    config = with_threads(config)               # a number instead of null
    print(describe_threads(config))             # Threads: 2 per process (2 cores, 1 process)

The bits of sums can depend on the number of threads, so a run keeps its number: it is part of the
configuration in the run folder, and a resume or a replay reads it there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from trainer.config.devices import run_devices
from trainer.config.schema import RunConfig
from trainer.memory import role_models
from trainer.run_folder.folder import THREADS, has_metrics, read_marker, saved_config, saved_steps
from verl_like.config_key import replace_keys
from verl_like.errors import VerlLikeError
from verl_like.placement.pools import expand_roles
from verl_like.process.machine import usable_cores
from workers.config import ModelConfig
from workers.models.memory_shapes import count_weights

C = TypeVar("C", bound=RunConfig)

MIN_WEIGHTS = 5_000_000
"""Number of weights from which a second thread pays in every call.

Measured with Llamas on two cores. A forward and backward pass over 16 x 64 tokens is 1.4 to 1.9
times as fast with two threads at any size from 0.1 million weights on. A decode pass of 64 and of 8
rows is 0.93 and 0.83 times as fast at 3.2 million weights, and 1.70 and 1.40 times at 7.9 million.
"""


def with_threads(config: C) -> C:
    """Return the configuration with a number of threads: the run's earlier one, or a new one."""
    if config.trainer.threads_per_process is not None:
        return config
    return replace_keys(config, {THREADS: recorded_threads(config) or best_threads(config)})


def recorded_threads(config: RunConfig) -> int | None:
    """Return the threads of the run that this one resumes or goes on with; None if it is new."""
    trainer, folder = config.trainer, Path(config.trainer.default_local_dir)
    with suppress(VerlLikeError):  # the resume reports damaged and missing files
        if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
            return int(read_marker(Path(trainer.resume_from_path))["config"][THREADS] or 1)
        if trainer.resume_mode == "auto" and (has_metrics(folder) or saved_steps(folder)):
            return int(saved_config(folder).get(THREADS) or 1)
    return None


def best_threads(config: RunConfig) -> int:
    """Return the cores per worker process of a node; 1 on GPUs and for small models."""
    if run_devices(config.trainer).type == "cuda":
        return 1
    threads = cores_for_threads() // processes_per_node(config)
    return threads if threads > 1 and largest_model(config) >= MIN_WEIGHTS else 1


def cores_for_threads() -> int:
    """Return the usable cores of this machine, at most OMP_NUM_THREADS, if it is set."""
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(usable_cores(), int(limit)) if limit.isdecimal() and int(limit) else usable_cores()


def processes_per_node(config: RunConfig) -> int:
    """Return the largest number of worker processes on a node; the driver counts if it computes."""
    sizes = {pool: sum(per_node) for pool, per_node in config.resource_pool_spec.items()}
    inline = [pool for pool, size in sizes.items() if config.is_inline(pool, size)]
    processes = sum(size for pool, size in sizes.items() if pool not in inline) + bool(inline)
    nodes, slots = config.trainer.nnodes, config.trainer.n_gpus_per_node
    return max(1, processes if nodes == 1 else min(processes, slots))


def largest_model(config: RunConfig) -> int:
    """Return the weights of the largest model that a role trains or runs; 0 if none is known."""
    sizes = [0]
    with suppress(VerlLikeError):  # the checks report models that cannot be read
        models = [(model.model, model.head) for model in role_models(config).values()]
        sampled = getattr(getattr(config, "actor_rollout_ref", None), "model", None)
        roles = map(config.kind_of, expand_roles(config.role_mapping))
        if isinstance(sampled, ModelConfig) and "rollout" in roles:
            models.append((sampled, "token"))
        for model, head in models:
            sizes.append(count_weights(model, head))
    return max(sizes)


def describe_threads(config: RunConfig) -> str:
    """Describe the threads of each process, and what they share; "" for one thread on GPUs."""
    threads = config.trainer.threads_per_process or 1
    if threads == 1 and run_devices(config.trainer).type == "cuda":
        return ""
    cores, processes = cores_for_threads(), processes_per_node(config)
    counts = f"{_count(cores, 'core')}, {_count(processes, 'process', 'es')}"
    line = f"Threads: {threads} per process ({counts})"
    if threads > 1 and threads * processes > cores:
        line += "; more threads than cores make steps slower, but change no number"
    return line


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
