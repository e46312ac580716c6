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

from trainer.check_loss.batches import Batch
from trainer.check_loss.subject import LOSS_SCALE_FACTOR, Subject, counts_of, look_up, match
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
"""(TRL's trainer, the aggregation that its documentation states) -> values of `loss_type`."""
TRAINERS = {
    "policy": {n: key for key, names in LOSSES.items() for n in names.split() if key[1]},
    "preference": {n: key for key, names in LOSSES.items() for n in names.split() if not key[1]},
}
"""Kind -> name behind `trl:` -> key of `LOSSES`."""


def subject_of(target: str, kind: str | None = None, **settings: Any) -> Subject:
    """Return the subject of `trl:NAME` or `verl:NAME`; settings are the framework's own fields."""
    system, _, name = target.partition(":")
    try:
        return (_of_trl if system == "trl" else _of_verl)(name, kind, settings)
    except ImportError as error:
        words = f"install it next to this package: pip install {system}=={VERSIONS[system]}"
        raise ConfigError(f"{target}: {system} cannot be imported ({error}): {words}.") from error


def _of_trl(name: str, kind: str | None, settings: Mapping[str, Any]) -> Subject:
    kind, (trainer_name, mode) = look_up(name, kind, TRAINERS, "trl has no loss")
    module = import_module(f"trl.trainer.{trainer_name.lower()}_trainer")
    config = {each.name: each.default for each in fields(getattr(module, f"{trainer_name}Config"))}
    loss_type = {"dpo": "sigmoid", "sft": "nll"}.get(name, name)
    config |= {"loss_type": loss_type, "max_completion_length": LOSS_SCALE_FACTOR}
    config |= {key: settings[key] for key in settings if key in config}
    # Whatever else a trainer has, such as `aux_loss_enabled`, is None.
    without = {"__getattr__": lambda trainer, attribute: None, "__init__": lambda trainer: None}
    trainer = type(trainer_name, (getattr(module, f"{trainer_name}Trainer"),), without)()
    vars(trainer).update(config, args=trainer, model=SimpleNamespace(training=True), _tp_size=1)
    trainer.state = SimpleNamespace(global_step=0)
    gather = dict.fromkeys(("reduce", "gather", "gather_for_metrics"), lambda tensor, **_: tensor)
    accelerator = trainer.accelerator = SimpleNamespace(**gather, device="cpu")
    accelerator.parallelism_config = accelerator.is_main_process = None
    trainer.epsilon_low = trainer.epsilon
    trainer.epsilon_high = trainer.epsilon if trainer.epsilon_high is None else trainer.epsilon_high
    trainer.loss_types, trainer.loss_weights = [trainer.loss_type], [1.0]
    trainer.precompute_ref_logps, trainer.calculate_KL = True, trainer.loss_type == "kto"
    trainer._metrics, trainer._total_train_tokens = {"train": defaultdict(list)}, 0
    trainer._get_per_token_logps_and_entropies = lambda _, ids, *__, **___: (ids, 0 * ids, None)

    def call(batch: Batch) -> Tensor:
        cuts, accelerator.num_processes = batch["num_micro_batches"], batch["dp_size"]
        trainer.current_gradient_accumulation_steps = trainer.steps_per_generation = cuts
        inputs = _tokens(batch) if mode else _pairs(batch, 1 if trainer_name == "KTO" else 2)
        num_tokens = inputs["num_items_in_batch"] = torch.tensor(batch["batch_num_tokens"])
        loss: Tensor = trainer.compute_loss(_model, inputs, num_items_in_batch=num_tokens)
        return loss if trainer_name in ("GRPO", "SFT") else loss / cuts  # which the Trainer divides

    variable = "log_prob" if mode else "log_probs"
    reads = {variable, "old_log_prob", "advantages", "response_mask", *counts_of()}
    reads |= {"desirable"} if trainer_name == "KTO" else set()
    return Subject(f"trl:{name}", kind, reads, call, variable, mode, config, equal_cuts=True)


def _model(input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
    """Return outputs whose log-probs or scores are the ids; log-probs are zero without a label."""
    inside = torch.ones_like(input_ids[:, 1:]) if labels is None else labels[:, 1:] != -100
    log_probs = input_ids[:, 1:].where(inside > 0, 0)
    outputs = dict.fromkeys(("entropy", "mean_logits", "log_sum_sq_probs"), 0 * log_probs)
    outputs |= {"logits": log_probs[:, :1], "is_top1": log_probs > 0, "label_mask": inside}
    return SimpleNamespace(log_probs=log_probs, **outputs)


def _tokens(batch: Batch) -> dict[str, Any]:
    """Return a batch of responses as trainers of TRL get it."""
    mask, log_prob, old = (batch[k] for k in ("response_mask", "log_prob", "old_log_prob"))
    inputs = {"advantages": batch["advantages"].where(mask > 0, 0).sum(1) / mask.sum(1).clamp(1)}
    inputs |= {"completion_ids": log_prob, "completion_mask": mask, "attention_mask": mask}
    inputs |= {"old_per_token_logps": old, "old_logps": (old * mask).sum(1)}
    inputs |= {"input_ids": pad(log_prob, (1, 0)), "labels": pad(mask * 101 - 100, (1, 0))}
    inputs |= dict.fromkeys(("prompt_ids", "prompt_mask"), mask[:, :0])
    return {**inputs, "ref_per_token_logps": batch["ref_log_prob"]}


def _pairs(batch: Batch, sides: int) -> dict[str, Any]:
    """Return chosen responses, then rejected ones; or the chosen ones alone, with labels.

    The log-prob of a response is at its first token, and zero at the others.
    """
    log_probs, lengths = (batch[k][:, :sides].T.reshape(-1, 1) for k in ("log_probs", "num_tokens"))
    places, ref = torch.arange(int(lengths.max()) + 2), batch["ref_log_probs"]
    mask = ((places > 0) & (places <= lengths.clamp(1))).long()
    kl_ids = pad(batch["gap"][:, None], (1, 0))
    inputs = {"input_ids": pad(log_probs, (1, len(places) - 2)), "completion_mask": mask}
    inputs |= {"attention_mask": mask, "margin": batch["margin"], "label": batch["desirable"]}
    inputs |= {"ref_chosen_logps": ref[:, 0], "ref_rejected_logps": ref[:, 1]}
    inputs |= {"KL_input_ids": kl_ids, "KL_attention_mask": kl_ids, "KL_completion_mask": kl_ids**0}
    return {**inputs, "ref_logps": ref[:, 0], "ref_KL_logps": 0 * batch["gap"]}


def _of_verl(name: str, kind: str | None, settings: Mapping[str, Any]) -> Subject:
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
        owners = [config, config.policy_loss]
        settings = {"loss_agg_mode": config.loss_agg_mode, **settings}
    keys = {each.name: owner for owner in reversed(owners) for each in fields(owner)}
    for key in {*keys} & {*settings}:
        object.__setattr__(keys[key], key, settings[key])
    subject = match(function, f"verl:{name}", kind, {**settings, "config": config})
    subject = replace(subject, settings={*keys, *subject.settings})
    if kind != "policy":
        return replace(subject, exempt=["prompt_tokens"])  # they are masked in the loss

    def call(batch: Batch) -> Any:
        info = {key: batch[key] for key in ("dp_size", *Denominators.__annotations__)}
        object.__setattr__(config, "global_batch_info", info)
        return subject.call(batch)

    told = replace(subject, call=call, reads={*subject.reads, *counts_of()})
    return with_actor(told, config, core.kl_penalty, core.agg_loss)


def with_actor(
    subject: Subject, actor: Any, kl_penalty: Callable[..., Tensor], agg_loss: Callable[..., Tensor]
) -> Subject:
    """Return the policy loss with the constant and the KL that its actor's section asks for."""

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
