"""A script or a command line that runs verl's `main_ppo`, in our settings.

    done = translate("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo ...")

What becomes of a key stands in `trainer.ppo.verl.keys`, which `verl-like ppo` reads, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.migrate.command import read_words
from trainer.migrate.translation import Translation
from trainer.migrate.variables import filled, variables_of
from trainer.ppo.verl.keys import SAME_VALUES
from trainer.ppo.verl.overrides import fate_of, values_of

ENGINE = "actor_rollout_ref.rollout.name"
DEFAULTS = {
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "trainer.logger": ["console", "wandb"],
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
}
"""Their defaults that are others here."""
TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def translate(text: str) -> Translation:
    """Settings, and a word on every key that is not the same here."""
    done, variables = Translation(), variables_of(text)
    words = read_words(text, "main_ppo")[1]
    values = values_of(words)
    given = {key: filled(value, variables) for key, value in values.items()}
    for key, value in values.items():
        _take(key, value, given, done)
    for word in words:
        if word.startswith("--config"):
            done.absent.append(f"{word}: there is one configuration, for every key of it")

    for key, theirs in DEFAULTS.items():
        done.default(key, theirs, {key: theirs})
    if done.settings.get(ENGINE) == "vllm":
        done.default(TENSOR_PARALLEL, 2, {TENSOR_PARALLEL: 2})
    return done


def _take(key: str, value: str, given: Mapping[str, str], done: Translation) -> None:
    """What becomes of one key; `given` has the values with the script's variables filled in."""
    fate = fate_of(key, given[key], given)
    if fate is None:
        done.absent.append(f"{key}={value}: no such key is known here")
    elif fate.nothing:
        done.always.append(f"{key}={value}: {fate.nothing}")
    elif fate.refused:
        done.absent.append(f"{key}={value}: {fate.refused}")
    elif fate.key == ENGINE and given[key] in ("sglang", "trtllm"):
        done.rename(key, [value], {ENGINE: "vllm"})
    elif fate.key == "trainer.device" and value == "npu":
        done.absent.append("trainer.device=npu: devices are CUDA's, or CPUs")
    elif fate.key.startswith("actor_rollout_ref.rollout.engine_kwargs.") and "vllm" not in key:
        done.absent.append(f"{key}={value}: the engine is vLLM")
    else:
        _set(fate.key, key, value, done)


def _set(ours: str, key: str, value: str, done: Translation) -> None:
    translated: Any = SAME_VALUES.get(ours, {}).get(value, value)
    if ours == key and translated == value:
        done.set(ours, value)
    else:
        done.rename(key, [value], {ours: translated})
