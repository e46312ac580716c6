"""Export a role's folder of a checkpoint as a Hugging Face folder or as a peft adapter.

This runs in one process without a cluster, for a checkpoint of any number of ranks, because weights
are stored by name in their full shape. The whole model is in host memory during the export.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl_like.errors import CheckpointError
from verl_like.files import atomic_folder
from workers.models.causal_lm import Head, empty_model
from workers.models.load import SCORE, load_weights
from workers.models.lora import add_adapter, merged_tensors, save_adapter
from workers.models.memory_shapes import meta_model
from workers.models.quantize import quantize_base
from workers.models.state import named_state
from workers.training.checkpoints.manifest import reject_changed
from workers.training.checkpoints.save_load import (
    reject_other_model,
    stored_weights,
    write_model_folder,
)
from workers.training.checkpoints.shards import read_shards, stored_tensors

if TYPE_CHECKING:
    from workers.config import ModelConfig

CPU = torch.device("cpu")
OTHER_BASE = "Set the folder of the model that it was trained from with --model."


def export_checkpoint(
    checkpoint: Path,
    model_config: ModelConfig,
    out: Path,
    *,
    as_adapter: bool = False,
    of_average: bool = False,
    settings: Mapping[str, Any],
) -> None:
    """Write the folder `out`, whole or not at all.

    `model_config` is the configuration that the role was trained with. With `of_average` the moving
    average replaces the weights. `settings` goes into the `config.json` of a classifier.
    """
    if as_adapter and model_config.lora_rank == 0:
        raise CheckpointError(f"{checkpoint} has no adapter (lora_rank=0). Leave out --adapter.")
    module = trained_module(checkpoint, model_config, of_average)
    with atomic_folder(out) as draft:
        if as_adapter:
            trained = [(n, p.detach()) for n, p in module.named_parameters() if p.requires_grad]
            save_adapter(draft, module, model_config, trained)
        else:
            weights = ((name, weight.detach()) for name, weight in named_state(module))
            merged = merged_tensors(module, weights)
            write_model_folder(module, model_config, merged, draft, settings)


def check_checkpoint_model(checkpoint: Path, model_config: ModelConfig, head: Head) -> None:
    """Reject a role's folder if its weight shapes differ from the model's."""
    try:
        saved = stored_tensors(checkpoint / "shards")
    except CheckpointError:
        return  # damaged: the later load reports which files
    weights = stored_weights(meta_model(model_config, head), model_config.lora_rank > 0)
    reject_other_model(checkpoint, weights, saved)


def trained_module(checkpoint: Path, model_config: ModelConfig, of_average: bool) -> Any:
    """Return the module on the CPU: trained weights from the checkpoint, others from the base."""
    reject_changed(checkpoint, "shards/")
    saved = stored_tensors(checkpoint / "shards")
    has_adapter = model_config.lora_rank > 0

    head: Head = "scalar" if f"model.{SCORE}" in saved else "token"
    module = empty_model(model_config, head, CPU)
    if has_adapter and model_config.quantization:
        quantize_base(module)
    if has_adapter:
        add_adapter(module, model_config)
    load_weights(module, model_config, head, CPU)

    weights = stored_weights(module, has_adapter)
    reject_other_model(checkpoint, weights, saved, OTHER_BASE)
    if of_average:
        averages = [name for name in saved if name.startswith("average.")]
        if not averages:
            raise CheckpointError(
                f"{checkpoint} holds no moving average: it was trained without "
                "actor_rollout_ref.actor.ema_decay. Leave out --average."
            )
        weights |= {name: weights.pop(name.replace("average", "model", 1)) for name in averages}
    read_shards(weights, checkpoint / "shards")
    return module
