"""Losses of TRL and verl, which are imported here alone: they are installed next to this package.

TRL's losses are methods of trainers. They are called on a stand-in that has a trainer's settings at
their defaults, and log-probs where the trainer would run a model.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trainer.check_loss.batches import ESTIMATOR, POLICY, VALUE, Batch
from trainer.check_loss.subject import COUNTS, LOSS_SCALE_FACTOR, Subject, match
from verl_like.errors import ConfigError, nearest
from workers.losses.registry import GIVEN

MODES = {
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), "token-mean"),
    **dict.fromkeys(("grpo", "sapo"), "seq-mean-token-mean"),
    **dict.fromkeys(("luspo", "rloo"), "seq-mean-token-sum"),
    "dr_grpo": "seq-mean-token-sum-norm",
}
"""TRL's `loss_type`, or its RLOO -> what its documentation says of the aggregation."""
SYSTEMS = ("trl:", "verl:")
READS = (*GIVEN[:4], *COUNTS)


def subject_of(target: str, kind: str | None = None, **settings: Any) -> Subject:
    """Return the subject of `trl:NAME` or `verl:NAME`; settings are the framework's own fields."""
    system, _, name = target.partition(":")
    make = {"trl": _of_trl, "verl": _of_verl}[system]
    try:
        return make(target, name, kind, settings)
    except ImportError as error:
        version = {"trl": "1.16", "verl": "0.9.1"}[system]
        words = f"install it next to this package: pip install {system}=={version}"
        raise ConfigError(
            f"{target}: {system} could not be imported ({error}): {words}."
        ) from error


def _of_trl(target: str, name: str, kind: str | None, settings: dict[str, Any]) -> Subject:
    if name not in MODES or kind not in (None, POLICY):
        known = ", ".join(MODES)
        raise ConfigError(f"{target}: TRL's policy losses are {known}.{nearest(name, MODES)}")
    family = "rloo" if name == "rloo" else "grpo"
    module = importlib.import_module(f"trl.trainer.{family}_trainer")
    trainer, config = (getattr(module, f"{family.upper()}{each}") for each in ("Trainer", "Config"))
    given = {"beta": 0.0, "max_completion_length": LOSS_SCALE_FACTOR, **settings, "loss_type": name}
    defaults = {each.name: each.default for each in fields(config)}
    for key in given if family == "grpo" else settings:
        _reject_unknown(target, key, defaults)
    args = SimpleNamespace(**defaults | given)
    stand_in = SimpleNamespace(
        **vars(args) | {"use_vllm": False, "epsilon_low": args.epsilon},
        args=args,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        get_gamma_weights=getattr(trainer, "get_gamma_weights", None),
    )
    stand_in.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high

    def call(batch: Batch, facts: Mapping[str, Any]) -> Tensor:
        mask, log_prob, cuts = batch["response_mask"], batch["log_prob"], facts["num_micro_batches"]
        of_tokens = log_prob, torch.zeros_like(log_prob), None
        stand_in._get_per_token_logps_and_entropies = lambda *_, **__: of_tokens
        stand_in.accelerator.num_processes = facts["dp_size"]
        stand_in.current_gradient_accumulation_steps = args.steps_per_generation = cuts
        inputs = dict.fromkeys(("prompt_ids", "prompt_mask"), mask[:, :0])
        inputs |= dict.fromkeys(("completion_ids", "completion_mask"), mask)
        inputs["advantages"] = batch["advantages"].where(mask > 0, 0).sum(1) / mask.sum(1).clamp(1)
        inputs["old_per_token_logps"] = batch["old_log_prob"]
        inputs["old_logps"] = (batch["old_log_prob"] * mask).sum(1)
        inputs["ref_per_token_logps"] = batch["ref_log_prob"]
        inputs["num_items_in_batch"] = torch.tensor(facts["batch_num_tokens"])
        loss: Tensor = trainer._compute_loss(stand_in, None, inputs)
        return loss / cuts if family == "rloo" else loss  # which the Trainer divides

    exempt = ["finite_differences"] if name == "vespo" else []  # its weights have no gradient
    return Subject(target, POLICY, READS, call, "log_prob", MODES[name], None, True, exempt)


def _of_verl(target: str, name: str, kind: str | None, settings: dict[str, Any]) -> Subject:
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    losses, estimators = algorithms.POLICY_LOSS_REGISTRY, algorithms.ADV_ESTIMATOR_REGISTRY
    if name == "value" and kind in (None, VALUE):
        return match(algorithms.compute_value_loss, target, VALUE, settings)
    if name in estimators and kind in (None, ESTIMATOR) and (kind or name not in losses):
        known = {each.name for each in fields(algorithms.AlgoConfig)}
        config = algorithms.AlgoConfig(**{key: settings[key] for key in known & {*settings}})
        subject = match(estimators[name], target, ESTIMATOR, {"config": config, **settings})
        return replace(subject, exempt=["prompt_tokens"])  # they are masked in the loss
    if name not in losses or kind not in (None, POLICY):
        names = [*losses, "value", *estimators]
        raise ConfigError(f"{target}: verl has {', '.join(names)}.{nearest(name, names)}")
    config = algorithms.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    mode = settings.pop("loss_agg_mode", config.loss_agg_mode)
    for key, value in settings.items():
        owner = config if hasattr(config, key) else config.policy_loss
        _reject_unknown(target, key, {each.name: each for each in fields(owner)})
        object.__setattr__(owner, key, value)

    def call(batch: Batch, facts: Mapping[str, Any]) -> Any:
        counts = {key: facts[key] for key in COUNTS[:4]}
        object.__setattr__(config, "global_batch_info", counts)
        columns = [batch[each] for each in GIVEN[:4]]
        return losses[name](*columns, facts["loss_agg_mode"], config)

    return Subject(target, POLICY, (*READS, "loss_agg_mode"), call, "log_prob", mode)


def _reject_unknown(target: str, key: str, known: Mapping[str, Any]) -> None:
    if key not in known:
        raise ConfigError(f"{target} has no setting {key!r}.{nearest(key, known)}")
