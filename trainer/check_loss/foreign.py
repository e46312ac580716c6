"""Losses and estimators of TRL 1.16 and verl 0.9.1, which are imported only here.

TRL's losses are methods of trainers. They are called on a trainer without a model: it has TRL's
default settings, and the batch has log-probs, or a reward model's scores, in place of token ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainer.check_loss.batches import ESTIMATOR, POLICY, PREFERENCE, VALUE, Batch
from trainer.check_loss.subject import LOSS_SCALE_FACTOR, Subject, counts_of, match
from verl_like.errors import ConfigError, nearest

VERSIONS = {"trl": "1.16", "verl": "0.9.1"}
MODES = {
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo", "sft", "dft"), "token-mean"),
    **dict.fromkeys(("grpo", "sapo"), "seq-mean-token-mean"),
    **dict.fromkeys(("luspo", "rloo"), "seq-mean-token-sum"),
    "dr_grpo": "seq-mean-token-sum-norm",
}
"""TRL's loss of tokens -> the aggregation that its documentation states."""
DPO = "dpo hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down"
TRAINERS = {
    **dict.fromkeys(MODES, "GRPO"),
    **{"rloo": "RLOO", "sft": "SFT", "dft": "SFT", "reward": "Reward"},
    **dict.fromkeys([*DPO.split(), "discopop", "sigmoid_norm"], "DPO"),
    **dict.fromkeys(["kto", "apo_zero_unpaired"], "KTO"),
}
"""Name behind `trl:` -> the trainer that has the loss; the name is its `loss_type`."""


def subject_of(
    target: str, kind: str | None = None, is_strict: bool = True, **settings: Any
) -> Subject:
    """Return the subject of `trl:NAME` or `verl:NAME`; settings are the framework's own fields.

    If it is not strict, fields that the function does not have are ignored.
    """
    system, _, name = target.partition(":")
    try:
        return (_of_trl if system == "trl" else _of_verl)(name, kind, settings, is_strict)
    except ImportError as error:
        words = f"install it next to this package: pip install {system}=={VERSIONS[system]}"
        raise ConfigError(f"{target}: {system} cannot be imported ({error}): {words}.") from error


def _of_trl(name: str, kind: str | None, settings: Mapping[str, Any], is_strict: bool) -> Subject:
    is_policy = name in MODES
    if name not in TRAINERS or kind not in (None, POLICY if is_policy else PREFERENCE):
        raise _unknown("trl", name, TRAINERS)
    trainer_name = TRAINERS[name]
    module = import_module(f"trl.trainer.{trainer_name.lower()}_trainer")
    config = {each.name: each.default for each in fields(getattr(module, f"{trainer_name}Config"))}
    known = _fields(f"trl:{name}", settings, config, is_strict)
    config |= {"loss_type": {"dpo": "sigmoid", "sft": "nll"}.get(name, name)}
    config |= {"max_completion_length": LOSS_SCALE_FACTOR, **known}
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
        inputs = _tokens(batch) if is_policy else _pairs(batch, 1 if trainer_name == "KTO" else 2)
        num_tokens = inputs["num_items_in_batch"] = torch.tensor(batch["batch_num_tokens"])
        loss: Tensor = trainer.compute_loss(_model, inputs, num_items_in_batch=num_tokens)
        return loss if trainer_name in ("GRPO", "SFT") else loss / cuts  # which the Trainer divides

    kind, variable = (POLICY, "log_prob") if is_policy else (PREFERENCE, "log_probs")
    reads = {"old_log_prob", "advantages", "response_mask", variable, *counts_of()}
    exempt = ["finite_differences"] if name == "vespo" else []  # its weights have no gradient
    return Subject(f"trl:{name}", kind, reads, call, variable, MODES.get(name), exempt, True)


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


def _of_verl(name: str, kind: str | None, settings: Mapping[str, Any], is_strict: bool) -> Subject:
    core = import_module("verl.trainer.ppo.core_algos")

    def sft_loss(log_prob: Tensor, response_mask: Tensor, dp_size: int, num_tokens: int) -> Any:
        data = {"dp_size": dp_size, "batch_num_tokens": num_tokens, "response_mask": response_mask}
        losses = import_module("verl.workers.utils.losses")
        return losses.sft_loss(None, {"log_probs": log_prob}, {**data, "pad_mode": "padded"})

    functions = {POLICY: {**core.POLICY_LOSS_REGISTRY, "sft": sft_loss}}
    functions |= {VALUE: {"value": core.compute_value_loss}, ESTIMATOR: core.ADV_ESTIMATOR_REGISTRY}
    kinds = [key for key in functions if kind in (None, key) and name in functions[key]]
    if not kinds:
        raise _unknown("verl", name, [str(key) for named in functions.values() for key in named])
    function, target = functions[kinds[0]][name], f"verl:{name}"
    if kinds[0] != POLICY:
        known = [each.name for each in fields(core.AlgoConfig)]
        given = _fields(target, settings, [*known, *signature(function).parameters], is_strict)
        config = core.AlgoConfig(**{key: given[key] for key in known if key in given})
        subject = match(function, target, kinds[0], {"config": config, **given})
        return replace(subject, exempt=["prompt_tokens"])  # they are masked in the loss

    config = core.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    known = [each.name for owner in (config, config.policy_loss) for each in fields(owner)]
    for key, value in _fields(target, settings, known, is_strict).items():
        object.__setattr__(config if hasattr(config, key) else config.policy_loss, key, value)
    given = {"config": config, "loss_agg_mode": config.loss_agg_mode}
    subject = match(function, target, POLICY, given)

    def call(batch: Batch) -> Tensor:
        counts = {key: batch[key] for key in [*counts_of()][:4]}
        counts["loss_scale_factor"] = config.loss_scale_factor or counts["loss_scale_factor"]
        object.__setattr__(config, "global_batch_info", counts)
        loss: Tensor = subject.call(batch)[0]
        if config.use_kl_loss:
            kl = core.kl_penalty(batch["log_prob"], batch["ref_log_prob"], config.kl_loss_type)
            mask, mode = batch["response_mask"], batch["loss_agg_mode"]
            loss = loss + config.kl_loss_coef * core.agg_loss(kl, mask, mode, **counts)
        return loss

    return replace(subject, call=call, reads={*subject.reads, *counts_of()})


def _fields(
    target: str, settings: Mapping[str, Any], known: Iterable[str], is_strict: bool
) -> dict[str, Any]:
    """Return the settings that are known; a strict subject rejects the others."""
    for key in {*settings} - {*known} if is_strict else ():
        raise ConfigError(f"{target} has no setting {key!r}.{nearest(key, known)}")
    return {key: value for key, value in settings.items() if key in {*known}}


def _unknown(system: str, name: str, known: Iterable[str]) -> ConfigError:
    words = f"{system} has {', '.join(known)}"
    return ConfigError(f"{system}:{name}: {words}.{nearest(name, known)}")
