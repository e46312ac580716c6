"""Random weights for a folder with a config.json and no weights, drawn as transformers does.

They fill an empty module; the folder can be checked before a process starts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_like.errors import ConfigError
from workers.config.conditions import is_bare_config
from workers.models.folder import model_folder, read_hf_config

if TYPE_CHECKING:
    from workers.config import ModelConfig

logger = logging.getLogger(__name__)


def check_weights(key: str, path: str, seed: int | None) -> None:
    """Reject a folder without weights, unless a seed asks for random ones."""
    if seed is None and is_bare_config(path):
        raise ConfigError(
            f"{key}={path} has a config.json and no weights. To begin with random ones, say so: "
            "model.random_init_seed=<number>, of the same section; or use a folder of "
            "save_pretrained."
        )


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Return all weights of the causal LM by name, equal on every rank; float32 in host memory."""
    from transformers import AutoModelForCausalLM

    check_weights("model.path", config.path, config.random_init_seed)
    assert config.random_init_seed is not None, "a folder without weights and seed was let through"
    logger.info("model.path=%s: random weights, seed %d", config.path, config.random_init_seed)
    hf_config = read_hf_config(model_folder(config.path))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.random_init_seed)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    weights: dict[str, Tensor] = model.state_dict()
    return weights
