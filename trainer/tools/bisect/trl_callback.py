"""Record a run of TRL 1.16.

A `RecordCallback` records GRPO and RLOO (samples, rewards, advantages, loss) and, for DPO and SFT,
the loss, the gradients, the learning rate and the norms of weights.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from verl_like.record import Recorder
from workers.training.norms import moment_norms, norms_by_name, projection

NAMES = {
    "prompts": "prompt_ids",
    "prompt_mask": "prompt_mask",
    "responses": "completion_ids",
    "rollout_log_probs": "sampling_per_token_logps",
    "old_log_probs": "old_per_token_logps",
    "ref_log_prob": "ref_per_token_logps",
    "advantages": "advantages",
}
"""Field of a record -> key of TRL's batch."""
PLAIN = (bool, int, float, str)
"""Types of arguments that a command line has."""


class RecordCallback(TrainerCallback):
    """Callback for TRL that records every optimizer step, with rows in the order of generation.

    Example:

        trainer.add_callback(RecordCallback(trainer, "records/trl"))
    """

    def __init__(self, trainer: Any, folder: str) -> None:
        self.recorder = Recorder(folder, "trl", settings_of(trainer))
        self.trainer, tokenizer = trainer, trainer.processing_class
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
        self.arrays: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self.passes: list[tuple[Any, Any]] = []
        self.recorder.step(0, **weights_of(trainer.model))
        for owner, name, watch in (
            (trainer, "_generate_and_score_completions", self.on_samples),
            (trainer, "_calculate_rewards", self.on_rewards),
            (trainer, "_get_per_token_logps_and_entropies", self.on_log_probs),
            (trainer, "compute_loss", self.on_loss),
            (trainer.accelerator, "clip_grad_norm_", self.on_clipping),
        ):
            if hasattr(owner, name):
                setattr(owner, name, watched(getattr(owner, name), watch))

    def on_samples(self, batch: Any, trainer_inputs: Any) -> None:
        """Take the batch of a generation."""
        taken = {field: batch[key] for field, key in NAMES.items() if batch.get(key) is not None}
        mask = batch["completion_mask"]
        tools = batch.get("tool_mask", torch.ones_like(mask))
        taken["response_mask"] = mask * tools
        # equal prompts follow each other
        taken["group"] = np.arange(len(mask)) // self.trainer.args.num_generations
        self.arrays |= taken

    def on_rewards(self, rewards: Any, trainer_inputs: Any) -> None:
        """Take the weighted sum of every sample's rewards, and the lengths of responses."""
        self.arrays["scores"] = (rewards * self.trainer.reward_weights.to(rewards)).nansum(1)
        responses = trainer_inputs[3]
        self.arrays["response_lengths"] = np.array([len(ids) for ids in responses])
        self.arrays["truncated"] = np.array([ids[-1] not in self.ends for ids in responses])

    def on_log_probs(self, outputs: Any, trainer_inputs: Any) -> None:
        """Take the tokens and log-probs of a pass with gradients; TRL has shuffled the rows."""
        if outputs[0].requires_grad:
            self.passes.append((trainer_inputs[1], outputs[0].detach()))

    def on_loss(self, loss: Any, trainer_inputs: Any) -> None:
        """Take the loss of a micro-batch, which TRL has divided by their number."""
        loss = loss[0] if isinstance(loss, tuple) else loss
        if loss.requires_grad:
            self.numbers["loss"] = self.numbers.get("loss", 0.0) + float(loss.detach())

    def on_clipping(self, norm: Any, accelerator_inputs: Any) -> None:
        """Take the norm of the gradients before they are clipped."""
        self.numbers["grad_norm"] = float(norm)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the gradients, which are clipped by now, and the learning rate."""
        named = kwargs["model"].named_parameters()
        self.numbers["grad_norms"] = norms_by_name((name, weight.grad) for name, weight in named)
        self.numbers["lr"] = kwargs["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the step."""
        norms = moment_norms(kwargs["optimizer"], kwargs["model"]) | weights_of(kwargs["model"])
        self.arrays |= log_probs(self.arrays, self.passes)
        if "log_probs" in self.arrays:  # TRL's old log-probs, if it has not computed them before
            self.arrays.setdefault("old_log_probs", self.arrays["log_probs"])
        self.recorder.step(state.global_step, self.arrays, **self.numbers, **norms)
        self.arrays, self.numbers, self.passes = {}, {}, []


def weights_of(model: Any) -> dict[str, dict[str, float]]:
    """Return norm and projection of every weight."""
    named = dict(model.named_parameters())
    projections = {name: projection(weight) for name, weight in named.items()}
    return {"weight_norms": norms_by_name(named.items()), "weight_projections": projections}


def settings_of(trainer: Any) -> dict[str, Any]:
    """Return TRL's arguments, and what `verl-like migrate trl RECORD` reads next to them.

    `trainer` is TRL's command, `given` the arguments that are not at their defaults, and
    `reward_funcs` has the file and the name of each reward function, or a model's path.
    """
    defaults = {f.name: f.default for f in fields(trainer.args)}
    config: dict[str, Any] = trainer.args.to_dict()
    plain = {name: value for name, value in config.items() if isinstance(value, PLAIN)}
    return config | {
        "model_name_or_path": trainer.model.config._name_or_path,
        "trainer": type(trainer).__name__.removesuffix("Trainer").lower(),
        "given": [
            name
            for name, value in plain.items()
            if value not in (defaults.get(name, value), f"<{name.upper()}>")
        ],
        "reward_funcs": [
            f"{inspect.getsourcefile(reward)}:{reward.__name__}"
            if inspect.isfunction(reward)
            else getattr(getattr(reward, "config", None), "_name_or_path", type(reward).__name__)
            for reward in getattr(trainer, "reward_funcs", [])
        ],
    }


def log_probs(arrays: dict[str, Any], passes: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the log-probs of the loss in the order of generation; empty if it has other rows."""
    pairs = [pair for ids, numbers in passes for pair in zip(ids.tolist(), numbers, strict=True)]
    rows = {tuple(ids): numbers for ids, numbers in pairs}
    if not rows or "responses" not in arrays:
        return {}
    samples = torch.cat([arrays["prompts"], arrays["responses"]], 1).tolist()
    if not {*map(tuple, samples)} <= rows.keys():
        return {}
    return {"log_probs": torch.stack([rows[tuple(ids)] for ids in samples])}


def watched(function: Any, watch: Any) -> Any:
    """Return the function, whose result is also passed to `watch`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        watch(result, args)
        return result

    return call
