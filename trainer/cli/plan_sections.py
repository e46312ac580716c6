"""Sections of the full plan (`verl-like check --full`): memory, placement, calls, sizes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from trainer.async_training.config import AsyncConfig
from trainer.async_training.plan import plan_lines
from trainer.config.devices import run_devices
from trainer.config.keys import leaf_keys
from trainer.config.unused_keys import unused_reason
from trainer.launch import nominal_placement
from trainer.memory import describe_axes, role_models
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe
from trainer.ppo.memory import fit_passes, plan_text
from trainer.ppo.roles import declared_models
from trainer.ppo.sizes import batch_table
from trainer.rows import preflight
from trainer.rows.config import RowConfig
from trainer.rows.trainer import step_sizes
from trainer.stubs import trace_step
from trainer.tools.report.read import read_run
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles
from workers.losses.registry import POLICY_LOSSES


def ppo_sections(config: PPOConfig, measured: str) -> dict[str, list[str]]:
    """Return the sections about memory, placement and calls of PPO and its variants."""
    config = fit_passes(config, run_devices(config.trainer))
    nodes, problem = trace_step(config)
    return {
        "Memory per device": plan_text(config, heading="").splitlines(),
        "Placement": placement_lines(config),
        **generators_sections(config, measured),
        "Calls of a step": describe(config, nodes, problem).splitlines(),
        "Batch sizes": batch_table(config, nodes).splitlines(),
        "Metrics to watch": watch_lines(config),
    }


def row_sections(config: RowConfig) -> dict[str, list[str]]:
    """Return the sections about memory, placement and batch sizes of a recipe on rows."""
    memory = preflight.plan_text(config, heading="")
    axes = describe_axes(config, role_models(config))
    placement = nominal_placement(config).draw(axes)
    return {
        "Memory per device": memory.splitlines(),
        "Placement": placement.splitlines(),
        "Batch sizes": [step_sizes(config)],
    }


def generators_sections(config: PPOConfig, measured: str) -> dict[str, list[str]]:
    """Describe an asynchronous run: its generators, its trainers and, if known, its speed."""
    if not isinstance(config, AsyncConfig):
        return {}
    speed = ["Add --measured RUN_DIR, the folder of a PPO run, to compare the seconds of both."]
    if measured:
        speed = measured_sides(measured, config.topology.generators)
    return {"Generators and trainers": plan_lines(config), "Speed": speed}


def measured_sides(folder: str, num_generators: int) -> list[str]:
    """Compare the seconds of generation and training that a run measured.

    The first step is left out if there are others, because caches and compilers warm up in it.
    """
    data = read_run(folder)
    timed = [line for line in data.metrics if line.get("timing_s/sample", 0.0) > 0.0]
    if not timed or any(name.startswith("async/") for name in timed[0]):
        raise ConfigError(
            f"{folder}/metrics.jsonl has no timing_s/sample of a synchronous run, so the time of "
            "generation is unknown. Pass the folder of a PPO run."
        )
    timed = timed[1:] or timed
    sample, sync, step = (
        sum(line.get(f"timing_s/{name}", 0.0) for line in timed) / len(timed)
        for name in ("sample", "sync", "step")
    )
    training = step - sample - sync
    slower = max(sample / num_generators + sync, training)
    lines = [
        f"Measured in steps {timed[0]['step']:.0f} to {timed[-1]['step']:.0f} of {folder}: "
        f"generation {sample:.3g} s, weight sync {sync:.3g} s, scores and updates {training:.3g} s",
        f"Generation takes {sample / training:.2g} times as long as scores and updates.",
        f"With async_training.generators={num_generators}, a step takes about {slower:.3g} s, if "
        "each generator and the trainer have as many devices as the run; synchronously, it takes "
        f"{step:.3g} s.",
    ]
    generated, trained = (
        {call.pool for call in data.calls if call.method in methods}
        for methods in (("generate_sequences", "take"), ("update_actor",))
    )
    if generated & trained:
        lines.append(
            "In this run, generation and training share devices. If you split the same devices in "
            "half, both take about twice as long."
        )
    return lines


def placement_lines(config: PPOConfig) -> list[str]:
    """Describe the placement on the configured nodes, and its consequences."""
    axes = describe_axes(config, declared_models(config, without_users=True))
    lines = nominal_placement(config).draw(axes).splitlines()
    pools = config.resource_pool_spec
    if len(pools) > 1 and all(config.is_inline(name, sum(pools[name])) for name in pools):
        lines.append(
            "All pools run in the driver's process, so calls run sequentially. Set "
            "trainer.backend=ray, or use two processes per pool, to let them overlap."
        )
    elif len(pools) == 1 and "critic" in expand_roles(config.role_mapping):
        if run_devices(config.trainer).type == "cpu" or sum(map(sum, pools.values())) > 1:
            lines.append("Set placement=split for a separate pool for the critic.")
    return lines


def watch_lines(config: PPOConfig) -> list[str]:
    """Return the metrics to watch for the run's estimator and loss, unless they are user code."""
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    chosen: dict[str, Callable[..., Any] | None] = {}
    if unused_reason(config, "algorithm.adv_estimator") is None:
        name = config.algorithm.adv_estimator
        chosen[f"advantage estimator {name}"] = ADVANTAGE_ESTIMATORS.get(name)
    chosen[f"policy loss {loss_mode}"] = POLICY_LOSSES.get(loss_mode)
    watched = {name: doc_parts(entry)[1] for name, entry in chosen.items() if entry is not None}
    return [f"{name}: {_with_full_keys(text, config)}" for name, text in watched.items()]


def _with_full_keys(text: str, config: PPOConfig) -> str:
    """Return the text on one line, with full names of keys such as `clip_ratio_high`."""
    keys = [key.name for key in leaf_keys(type(config))]

    def full(short: re.Match[str]) -> str:
        names = [key for key in keys if f".{key}".endswith(f".{short[1]}")]
        return f"`{names[0]}`" if len(names) == 1 else short[0]

    return re.sub(r"`([\w.]+)`", full, " ".join(text.split()))


def doc_parts(algorithm: Callable[..., Any]) -> tuple[str, str, str]:
    """Return formula, metrics to watch and source from a docstring; "" for a missing one."""
    formula, fields = [], {"Watch": "", "Source": ""}
    for paragraph in inspect.cleandoc(algorithm.__doc__ or "").split("\n\n"):
        label, colon, text = paragraph.partition(": ")
        if colon and label in fields:
            fields[label] = text
        else:
            formula.append(paragraph)
    return "\n\n".join(formula), fields["Watch"], fields["Source"]
