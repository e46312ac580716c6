"""Losses and estimators of TRL 1.16 and verl 0.9.1, which are imported only here.

TRL's losses are methods of trainers. They are called on a trainer without a model: it has TRL's
default settings, and the batch has log-probs, or a reward model's scores, in place of token ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.tools.check_loss.batches import Batch
from trainer.tools.check_loss.subject import LOSS_SCALE_FACTOR, Subject, counts_of, look_up, match
from verl_like.errors import ConfigError
from workers.losses.aggregate import Denominators

VERSIONS = {"trl": "1.16", "verl": "0.9.1"}
LOSSES = {
    ("GRPO", "token-mean"): "dapo bnpo cispo vespo",
    ("GRPO", "seq-mean-token-mean"): "grpo sapo",
    ("GRPO", "seq-mean-token-sum"): "luspo",
    ("GRPO", "seq-mean-token-sum-norm"): "dr_grpo",
    ("RLOO", "seq-mean-token-sum"): "rloo",
    ("SFT", "token-mean"): "sft dft",
    ("Reward", None): "reward",
    ("DPO", None): "dpo hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired "
    "apo_zero apo_down discopop sigmoid_norm",
    ("KTO", None): "kto apo_zero_unpaired",
}
"""(TRL's trainer, the aggregation stated in its documentation) -> values of `loss_type`."""
TRAINERS = {
    "policy": {n: key for key, names in LOSSES.items() for n in names.split() if key[1]},
    "preference": {n: key for key, names in LOSSES.items() for n in names.split() if not key[1]},
}
"""Kind -> name after `trl:` -> key of `LOSSES`."""


def subject_of(target: str, kind: str | None = None, **settings: Any) -> Subject:
    """Return `trl:NAME` or `verl:NAME` as a subject; `settings` are fields of its configuration."""
    system, _, name = target.partition(":")
    try:
        return (_trl_subject if system == "trl" else _verl_subject)(name, kind, settings)
    except ImportError as error:
        remedy = f"Install it next to this package: pip install {system}=={VERSIONS[system]}"
        raise ConfigError(f"{target}: {system} cannot be imported ({error}). {remedy}") from error


def _trl_subject(name: str, kind: str | None, settings: Mapping[str, Any]) -> Subject:
    """Return a loss of TRL as a subject: `compute_loss` of its trainer, without a model.

    The trainer is a stand-in object with the fields of its configuration. Its model passes on the
    log-probs that it gets as token ids (see `_model`).
    """
    kind, (trainer_name, mode) = look_up(name, kind, TRAINERS, "trl has no loss")
    module = import_module(f"trl.trainer.{trainer_name.lower()}_trainer")
    config = {f.name: f.default for f in fields(getattr(module, f"{trainer_name}Config"))}
    config["loss_type"] = {"dpo": "sigmoid", "sft": "nll"}.get(name, name)
    config["max_completion_length"] = LOSS_SCALE_FACTOR
    config |= {key: settings[key] for key in settings if key in config}
    # One object serves as the trainer, its settings, model, state and accelerator. Their other
    # attributes, such as `aux_loss_enabled`, are None.
    without = {"__getattr__": lambda trainer, attribute: None, "__init__": lambda trainer: None}
    trainer: Any = type(trainer_name, (getattr(module, f"{trainer_name}Trainer"),), without)()
    vars(trainer).update(
        config,
        **dict.fromkeys(("args", "model", "state", "accelerator"), trainer),
        **dict.fromkeys(("reduce", "gather", "gather_for_metrics"), lambda tensor, **_: tensor),
        **dict.fromkeys(("training", "precompute_ref_logps", "_tp_size"), True),
        **dict.fromkeys(("global_step", "_total_train_tokens"), 0),
        device="cpu",
        epsilon_low=config.get("epsilon"),
        calculate_KL=config["loss_type"] == "kto",
        loss_types=[config["loss_type"]],
        loss_weights=[1.0],
        _metrics={"train": defaultdict(list)},
        _compute_kl_logps=lambda _, inputs: inputs["gap"],
        _get_per_token_logps_and_entropies=lambda _, ids, *__, **___: (ids, 0 * ids, None),
    )
    if trainer.epsilon_high is None:
        trainer.epsilon_high = trainer.epsilon_low

    def call(batch: Batch) -> Tensor:
        cuts, trainer.num_processes = batch["num_micro_batches"], batch["dp_size"]
        trainer.current_gradient_accumulation_steps = trainer.steps_per_generation = cuts
        sides = 1 if trainer_name == "KTO" else 2
        inputs = _tokens(batch) if mode else _pairs(batch, sides)
        num_tokens = inputs["num_items_in_batch"] = torch.tensor(batch["batch_num_tokens"])
        loss: Tensor = trainer.compute_loss(_model, inputs, num_items_in_batch=num_tokens)
        return loss if trainer_name in ("GRPO", "SFT") else loss / cuts  # as `Trainer` does

    columns = ["log_prob", "old_log_prob", "advantages", "response_mask"] if mode else ["log_probs"]
    columns += ["desirable"] if trainer_name == "KTO" else []
    reads = {*columns, *counts_of()}
    return Subject(f"trl:{name}", kind, reads, call, columns[0], mode, config, equal_cuts=True)


def _model(input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
    """Return outputs with the ids as log-probs or scores; log-probs are zero without a label."""
    inside = torch.ones_like(input_ids[:, 1:]) if labels is None else labels[:, 1:] != -100
    log_probs = input_ids[:, 1:].where(inside > 0, 0)
    outputs = dict.fromkeys(("entropy", "mean_logits", "log_sum_sq_probs"), 0 * log_probs)
    outputs |= {"logits": log_probs[:, :1], "is_top1": log_probs > 0, "label_mask": inside}
    return SimpleNamespace(log_probs=log_probs, **outputs)


def _tokens(batch: Batch) -> dict[str, Any]:
    """Return a batch of responses in the format of TRL's trainers."""
    mask, log_prob, old = (batch[k] for k in ("response_mask", "log_prob", "old_log_prob"))
    inputs = {"advantages": batch["advantages"].where(mask > 0, 0).sum(1) / mask.sum(1).clamp(1)}
    inputs |= {"completion_ids": log_prob, "completion_mask": mask, "attention_mask": mask}
    inputs |= {"old_per_token_logps": old, "old_logps": (old * mask).sum(1)}
    inputs |= {"input_ids": pad(log_prob, (1, 0)), "labels": pad(mask * 101 - 100, (1, 0))}
    inputs |= dict.fromkeys(("prompt_ids", "prompt_mask"), mask[:, :0])
    return {**inputs, "ref_per_token_logps": batch["ref_log_prob"]}


def _pairs(batch: Batch, sides: int) -> dict[str, Any]:
    """Return, in TRL's format, chosen and then rejected responses, or only chosen ones with labels.

    The log-prob of a response is at its first token, and zero at the others.
    """
    log_probs, lengths = (batch[k][:, :sides].T.reshape(-1, 1) for k in ("log_probs", "num_tokens"))
    places, ref = torch.arange(int(lengths.max()) + 2), batch["ref_log_probs"]
    mask = ((places > 0) & (places <= lengths.clamp(1))).long()
    inputs = {"input_ids": pad(log_probs, (1, len(places) - 2)), "label": batch["desirable"]}
    inputs |= {"ref_chosen_logps": ref[:, 0], "ref_rejected_logps": ref[:, 1]}
    inputs |= {"ref_logps": ref[:, 0], "ref_KL_logps": 0 * batch["gap"]}
    return {**batch, **inputs, "completion_mask": mask, "attention_mask": mask}


def _verl_subject(name: str, kind: str | None, settings: Mapping[str, Any]) -> Subject:
    """Return a loss or an advantage estimator of verl as a subject.

    Fields of verl's configuration that `settings` has are set. A policy loss gets the scale factor
    and the KL term of verl's actor.
    """
    core = import_module("verl.trainer.ppo.core_algos")

    def sft(log_prob: Tensor, response_mask: Tensor, config: Any) -> Any:
        data = {**config.global_batch_info, "response_mask": response_mask, "pad_mode": "padded"}
        losses = import_module("verl.workers.utils.losses")
        return losses.sft_loss(None, {"log_probs": log_prob}, data)

    functions = {
        "policy": {**core.POLICY_LOSS_REGISTRY, "sft": sft},
        "value": {"value": core.compute_value_loss},
        "estimator": core.ADV_ESTIMATOR_REGISTRY,
    }
    kind, function = look_up(name, kind, functions, "verl has no loss or estimator")
    config = core.AlgoConfig()
    owners = [config]
    if kind == "policy":
        config = core.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
        owners = [config.policy_loss, config]
        settings = {"loss_agg_mode": config.loss_agg_mode, **settings}
    owner_of = {f.name: owner for owner in owners for f in fields(owner)}
    for key in {*owner_of} & {*settings}:
        object.__setattr__(owner_of[key], key, settings[key])
    subject = match(function, f"verl:{name}", kind, {**settings, "config": config})
    subject = replace(subject, settings={*owner_of, *subject.settings})
    if kind != "policy":
        return replace(subject, exempt=["prompt_tokens"])  # verl masks these in the loss

    def call(batch: Batch) -> Any:
        info = {key: batch[key] for key in ("dp_size", *Denominators.__annotations__)}
        object.__setattr__(config, "global_batch_info", info)
        return subject.call(batch)

    with_counts = replace(subject, call=call, reads={*subject.reads, *counts_of()})
    return with_actor(with_counts, config, core.kl_penalty, core.agg_loss)


def with_actor(
    subject: Subject, actor: Any, kl_penalty: Callable[..., Tensor], agg_loss: Callable[..., Tensor]
) -> Subject:
    """Return the policy loss with the scale factor and the KL term of the actor's configuration."""

    def call(batch: Batch) -> Tensor:
        scale = actor.loss_scale_factor or batch["loss_scale_factor"]
        batch = {**batch, "loss_scale_factor": scale}
        loss: Tensor = subject.call(batch)[0]
        if actor.use_kl_loss:
            kl = kl_penalty(batch["log_prob"], batch["ref_log_prob"], actor.kl_loss_type)
            counts = {key: batch[key] for key in signature(agg_loss).parameters if key in batch}
            loss = loss + actor.kl_loss_coef * agg_loss(kl, batch["response_mask"], **counts)
        return loss

    return replace(subject, call=call)
