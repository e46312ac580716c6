"""Facts for the report's first screen: model, data, reward, algorithm, devices, commit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from trainer.observers.alarms import ALARM_RULES
from trainer.run_folder.metrics import MetricLines
from trainer.tools.report.read import RunData, RunStart

SHOWN_SOURCES = 3
PPO_MODEL = "actor_rollout_ref.model"


class Fact(NamedTuple):
    """A name, its value, and smaller text below the value."""

    name: str
    value: str
    details: str = ""


Setting = Callable[[str], Any]
"""Dotted key -> its value, or None."""


def facts_of(data: RunData, config: dict[str, Any]) -> list[Fact]:
    """Return the facts that the run folder has; `config` is the content of `config.yaml`."""

    def setting(key: str) -> Any:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    start = data.starts[-1] if data.starts else RunStart("", "", "", "")
    section = PPO_MODEL if setting(f"{PPO_MODEL}.path") else "model"
    adapter, validation = setting(f"{section}.lora_rank"), _joined(setting("data.val_files"))
    rows = [] if start.rows is None else [f"{start.rows:,} rows"]
    if validation:
        rows.append(f"validated on {validation}")
    facts = [
        Fact(
            "Model", _joined(setting(f"{section}.path")), f"LoRA, rank {adapter}" if adapter else ""
        ),
        Fact("Data", _joined(setting("data.train_files")), ", ".join(rows)),
        Fact("Reward", ", ".join(_rewards(setting, data.data_sources))),
        Fact("Algorithm", _algorithm(setting, start.command), _sizes(setting)),
        Fact("Devices", _devices(data.placement), start.host),
        Fact(
            "Commit", "no repository" if start.commit == "" else start.commit or "", start.package
        ),
    ]
    return [fact for fact in facts if fact.value]


def _joined(value: Any) -> str:
    """Return a path, or a list of paths as text."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _rewards(setting: Setting, sources: Sequence[str]) -> Iterator[str]:
    """Yield the environment and the rewards by their paths, or the rule of the data."""
    if setting("reward") is None:
        return
    paths, named = setting("environment.paths"), setting("reward.list")
    places = [setting("environment.path"), *(paths.values() if isinstance(paths, dict) else ())]
    function = setting("reward.function.path")
    if function and str(function).endswith(".py"):
        function = f"{function}:{setting('reward.function.name')}"
    rewards = named if isinstance(named, list) else ()
    places += [function, *(row.get("name") for row in rewards if isinstance(row, dict))]
    if setting("reward.model.enable"):
        places.append(f"reward model {setting('reward.model.path')}")
    places = [str(place) for place in places if place]
    if sources and not places:
        places = [f"rule for {', '.join(sources[:SHOWN_SOURCES])}"]
    yield from places


def _algorithm(setting: Setting, command: str) -> str:
    """Return the preset of the command, or the estimator, the loss or the trainer's class."""
    preset = re.search(r"\balgorithm=(\w+)", command)
    estimator, loss = setting("algorithm.adv_estimator"), setting("loss")
    trainer = str(setting("trainer.cls") or "").rpartition(".")[2].removesuffix("Trainer")
    name = preset[1] if preset and estimator else str(estimator or loss or trainer)
    name = "PPO with GAE" if name == "gae" else name
    policy_loss = setting("actor_rollout_ref.actor.policy_loss.loss_mode")
    is_named = policy_loss in (None, "vanilla", name)
    return name if is_named else f"{name}, {policy_loss} loss"


def _sizes(setting: Setting) -> str:
    """Describe the batch and the learning rate."""
    batch, samples = setting("data.train_batch_size"), setting("actor_rollout_ref.rollout.n")
    rate = setting("actor_rollout_ref.actor.optim.lr") or setting("optim.lr")
    words = [f"{batch} prompts x {samples} samples" if samples else f"{batch} rows"]
    if isinstance(rate, float):
        words.append(f"lr {rate:g}")
    return ", ".join(words) if batch else ""


def _devices(placement: Sequence[Sequence[str]]) -> str:
    """Return the devices of all pools, as the printed placement counts them."""
    if not placement or "devices" not in placement[0]:
        return ""
    column = placement[0].index("devices")
    counts = Counter(row[column] for row in placement[1:] if len(row) > column)
    return " + ".join(f"{n} x {devices}" if n > 1 else devices for devices, n in counts.items())


def alarms_of(metrics: MetricLines) -> list[str]:
    """Return the alarms of the run, one per kind, with the steps that raised it.

    PPO's rules include those of the other recipes.
    """
    stored = dict[str, float]()
    steps = dict[str, list[int]]()
    texts = dict[str, str]()
    for line in metrics:
        for rule in ALARM_RULES:
            for kind, text in rule(line, stored):
                steps.setdefault(kind, []).append(int(line["step"]))
                texts[kind] = text
    lines = []
    for kind, raised in steps.items():
        count = f"Steps {raised[0]} to {raised[-1]}, {len(raised)} times"
        lines.append(f"{count if len(raised) > 1 else f'Step {raised[0]}'}: {texts[kind]}")
    return lines
