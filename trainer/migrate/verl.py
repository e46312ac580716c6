"""A script or a command line that runs verl's `main_ppo` or `main_ppo_split`, in our settings.

    done = translate("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo ...")

What becomes of a key says `trainer.ppo.verl`, which `verl-like ppo` reads, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.config.keys import leaf_keys
from trainer.migrate.command import filled, read_words, variables_of
from trainer.migrate.listing import is_listing
from trainer.migrate.listing import translate as translate_listing
from trainer.migrate.translation import Translation
from trainer.ppo.config import PPOConfig
from trainer.ppo.verl import SAME_VALUES, fate_of, tables

ACTOR, ENGINE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.name"
SPLIT = "main_ppo_split"
"""The driver of verl's example of split placement."""
DEFAULTS = {
    f"{ACTOR}.ppo_mini_batch_size": 256,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "trainer.logger": ["console", "wandb"],
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
}
"""Their defaults that are others here."""
SETTING = re.compile(r"\+{0,2}(?P<key>[\w./@-]+)=(?P<value>.*)", re.S)
"""With variables of the shell in it, as no parser of settings reads it."""
TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
LOSS, AGGREGATION = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
OVER_SEQUENCES = ("geo_mean", "sapo")
"""Losses that verl averages over sequences, whatever `loss_agg_mode` says."""
CHOOSES = (
    "tokens are chosen from a mini-batch by the old log-probs, there from each micro-batch by its"
)
DIFFERS = {
    "clip_cov": CHOOSES,
    "kl_cov": CHOOSES,
    "gspo": "older verl has seq-mean-token-mean, whatever loss_agg_mode says; set it for that",
    "geo_mean": "rollout_is weighs its tokens, there a sequence by their weights' geometric mean",
}
"""Loss -> what of it is never quite the same."""
CORRECTION = "algorithm.rollout_correction"


def translate(text: str) -> Translation:
    """Settings, and a word on every key that is not the same."""
    if is_listing("verl", text):
        return translate_listing("verl", text)
    done, variables = Translation(), variables_of(text)
    program, words = read_words(text, "main_ppo", SPLIT)
    if program == SPLIT:
        done.rename(f"{SPLIT}.py", {"placement": "split"})
    matches = [SETTING.fullmatch(word) for word in words]
    values = {match["key"]: match["value"] for match in matches if match is not None}
    given = {key: filled(value, variables) for key, value in values.items()}
    for key, value in values.items():
        _take(key, value, given, done)
    for word in words:
        if word.startswith("--config"):
            done.absent.append(f"{word}: there is one configuration, for every key of it")

    _objective(given, done)
    for key, theirs in DEFAULTS.items():
        done.default(key, theirs, {key: theirs})
    if done.settings.get(ENGINE) == "vllm":
        done.default(TENSOR_PARALLEL, 2, {TENSOR_PARALLEL: 2})
    if any(key.endswith("micro_batch_size_per_gpu") for key in done.settings):
        by_tokens = f"{ACTOR}.use_dynamic_bsz"
        done.default(by_tokens, False, {by_tokens: False})
    return done


def _objective(given: Mapping[str, str], done: Translation) -> None:
    """What the loss is there, where the same words mean another one here."""

    def is_on(key: str) -> bool:
        return given.get(key, "").lower() not in ("", "false", "0", "0.0", "none", "null")

    loss, aggregation = given.get(LOSS, "vanilla"), given.get(AGGREGATION, "token-mean")
    if is_on(f"{CORRECTION}.bypass_mode") and loss != "vanilla":
        done.rename(
            f"{LOSS}={loss} under bypass_mode, which does not read it there", {LOSS: "vanilla"}
        )
        loss = "vanilla"
    if f"{ACTOR}.clip_ratio" in given:  # theirs is read where these two are null
        for key in (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"):
            done.default(key, 0.2, {key: 0.2})
    if loss == "kl_cov":
        weight = f"{ACTOR}.policy_loss.ppo_kl_coef"
        done.default(weight, 0.1, {weight: 0.1})

    over_sequences = "seq-mean-token-mean"
    if loss in OVER_SEQUENCES and aggregation != over_sequences:
        done.rename(f"{LOSS}={loss}, a mean over sequences there", {AGGREGATION: over_sequences})
        done.default(
            AGGREGATION, f"{aggregation} for values", {"critic.loss_agg_mode": aggregation}
        )
        if is_on(f"{ACTOR}.entropy_coeff") or is_on(f"{ACTOR}.use_kl_loss"):
            done.absent.append(
                f"{AGGREGATION}={aggregation} of entropy and KL: they are averaged as the loss"
            )
    if loss in DIFFERS and (loss != "geo_mean" or is_on(f"{CORRECTION}.rollout_is")):
        if loss != "gspo" or AGGREGATION not in given:
            done.absent.append(f"{LOSS}={loss}: {DIFFERS[loss]}")


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
        done.rename(f"{key} {value}", {ENGINE: "vllm"})
    elif fate.key == "trainer.device" and value == "npu":
        done.absent.append("trainer.device=npu: devices are CUDA's, or CPUs")
    elif fate.key.startswith("actor_rollout_ref.rollout.engine_kwargs.") and "vllm" not in key:
        done.absent.append(f"{key}={value}: the engine is vLLM")
    else:
        ours = SAME_VALUES.get(fate.key, {}).get(value, value)
        if fate.key == key and ours == value:
            done.settings[key] = value
        else:
            done.rename(f"{key} {value}", {fate.key: ours})


def doc_rows() -> list[list[str]]:
    """(there, here) of verl's keys that are no keys here by the same name, for the docs."""
    fields = {key.rules.verl: key.name for key in leaf_keys(PPOConfig) if key.rules.verl}
    table = tables()
    here = {name: f"`{ours}`" for name, ours in {**fields, **table.renamed}.items()}
    here |= {name: f"changes nothing: {why}" for name, why in table.changes_nothing.items()}
    for name, row in table.changes_nothing_at.items():
        listed = ", ".join(f"`{value}`" for value in row["at"])
        here[name] = f"changes nothing at {listed}; else: {row['else']}"
    for name, like in table.as_the_actors.items():
        here[name] = f"changes nothing at the actor's value; else: set `{like['actor']}`"
    here |= {name: f"not here: {way_out}" for name, way_out in table.not_here.items()}
    return sorted([f"`{name}`", text] for name, text in here.items())
