"""Record a run of TRL 1.16: `trainer.add_callback(RecordCallback(trainer, "records/trl"))`.

It records GRPO and RLOO (samples, rewards, advantages, loss) and, for DPO and SFT, the loss, the
gradients, the learning rate and the norms of weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from verl_like.record import Recorder

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


class RecordCallback(TrainerCallback):
    """Writes a step after each optimizer step; the rows are in the order of generation."""

    def __init__(self, trainer: Any, folder: str) -> None:
        path = trainer.model.config._name_or_path
        config = trainer.args.to_dict() | {"model_name_or_path": path}
        self.recorder = Recorder(folder, "trl", config)
        self.group_size = getattr(trainer.args, "num_generations", 1)
        self.arrays: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self.losses: list[float] = []
        self.passes: list[tuple[Any, Any]] = []
        self.recorder.step(0, weight_norms=norms(trainer.model.named_parameters()))
        for name, watch in (
            ("_generate_and_score_completions", self.on_samples),
            ("_calculate_rewards", self.on_rewards),
            ("_get_per_token_logps_and_entropies", self.on_log_probs),
            ("compute_loss", self.on_loss),
        ):
            if hasattr(trainer, name):
                setattr(trainer, name, watched(getattr(trainer, name), watch))

    def on_samples(self, batch: Any, trainer_inputs: Any) -> None:
        """Take the batch of a generation."""
        taken = {field: batch[key] for field, key in NAMES.items() if batch.get(key) is not None}
        mask = batch["completion_mask"]
        tools = batch.get("tool_mask", torch.ones_like(mask))
        taken |= {"response_mask": mask * tools, "response_lengths": mask.sum(1)}
        taken["group"] = np.arange(len(mask)) // self.group_size
        self.arrays |= taken

    def on_rewards(self, rewards: Any, trainer_inputs: Any) -> None:
        """Take the sum of the rewards of every sample; equal prompts follow each other."""
        self.arrays["scores"] = rewards.nansum(1)

    def on_log_probs(self, outputs: Any, trainer_inputs: Any) -> None:
        """Take the tokens and log-probs of a pass with gradients; TRL has shuffled the rows."""
        if outputs[0].requires_grad:
            self.passes.append((trainer_inputs[1], outputs[0].detach()))

    def on_loss(self, loss: Any, trainer_inputs: Any) -> None:
        """Take the loss of a micro-batch, which TRL has divided by their number."""
        loss = loss[0] if isinstance(loss, tuple) else loss
        if loss.requires_grad:
            self.losses.append(float(loss.detach()))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the gradients, which are clipped by now, and the learning rate."""
        named = [(n, p.grad) for n, p in kwargs["model"].named_parameters() if p.grad is not None]
        self.numbers["grad_norms"] = norms(named)
        self.numbers["lr"] = kwargs["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the step."""
        weights = norms(kwargs["model"].named_parameters())
        loss, self.losses = float(np.sum(self.losses)), []
        self.arrays |= log_probs(self.arrays, self.passes)
        self.passes = []
        self.recorder.step(
            state.global_step, self.arrays, loss=loss, weight_norms=weights, **self.numbers
        )
        self.arrays, self.numbers = {}, {}


def log_probs(arrays: dict[str, Any], passes: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the log-probs of the loss in the order of generation; empty if it has other rows."""
    pairs = [pair for ids, numbers in passes for pair in zip(ids.tolist(), numbers, strict=True)]
    rows = {tuple(ids): numbers for ids, numbers in pairs}
    names = ("prompts", "responses") if "responses" in arrays else ()
    wanted = torch.cat([arrays[name] for name in names], 1).tolist() if names else []
    matching = [rows[tuple(ids)] for ids in wanted if tuple(ids) in rows]
    return {"log_probs": torch.stack(matching)} if matching and len(matching) == len(wanted) else {}


def norms(named: Any) -> dict[str, float]:
    """Return the Euclidean norm of every tensor."""
    return {name: float(tensor.detach().double().norm()) for name, tensor in named}


def watched(function: Any, watch: Any) -> Any:
    """Return the function, whose result is also passed to `watch`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        watch(result, args)
        return result

    return call
