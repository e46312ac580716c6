"""Loading a Hugging Face causal LM for training, with its token head or with a scalar head. `engines/fsdp` calls this.

Dropout is off for good: with it the log-probs of one policy would differ between two passes, and PPO's ratio would be
noise before the first step.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from verl_like.errors import ConfigError, nearest

if TYPE_CHECKING:
    from workers.config import ModelConfig

Head = Literal["token", "scalar"]


class ScalarHeadModel(nn.Module):
    """A causal LM's body under a `Linear(hidden, 1)` that starts at zero, so that training starts from values of zero.

    Parameter names are those of Hugging Face's sequence classifiers (`model.…`, `score.weight`).
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.config = causal_lm.config
        self._no_split_modules = causal_lm._no_split_modules
        self._prefix: str = causal_lm.base_model_prefix
        setattr(self, self._prefix, causal_lm.base_model)
        hidden_size = causal_lm.get_input_embeddings().embedding_dim
        self.score = nn.Linear(hidden_size, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    @property
    def body(self) -> Any:
        """The base model, without its language-model head."""
        return getattr(self, self._prefix)

    def forward(self, **inputs: Any) -> Tensor:
        """One scalar per position: [rows, width, 1]."""
        scores: Tensor = self.score(self.body(**inputs).last_hidden_state)
        return scores


def load_model(config: ModelConfig, head: Head) -> Any:
    """The module in evaluation mode, from the folder `config.path`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if config.dtype not in dtypes:
        valid = ", ".join(dtypes)
        raise ConfigError(f"model.dtype={config.dtype!r} is unknown; valid: {valid}.{nearest(config.dtype, dtypes)}")
    if not (Path(config.path) / "config.json").is_file():
        raise ConfigError(
            f"model.path={config.path!r} is not a Hugging Face model folder (no config.json there); "
            "`python examples/tiny/make.py DIR` makes a tiny one in DIR/model."
        )
    try:
        hf_config = AutoConfig.from_pretrained(config.path, local_files_only=True)
        for name, value in hf_config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(hf_config, name, 0.0)
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            config=hf_config,
            dtype=dtypes[config.dtype],
            attn_implementation=config.attn_implementation,
            local_files_only=True,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.path={config.path!r} does not load as a causal LM: {error}") from error
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return (model if head == "token" else ScalarHeadModel(model)).eval()


def model_inputs(model: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> dict[str, Any]:
    """Keyword arguments of one forward pass over padded rows; a family without position ids (BLOOM) gets none."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and input_ids.size(1) > limit:
        raise ConfigError(
            f"rows of {input_ids.size(1)} tokens are longer than the model's {limit} positions; "
            "lower data.max_prompt_length or data.max_response_length."
        )
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    body = model.body if isinstance(model, ScalarHeadModel) else model
    if "position_ids" in inspect.signature(body.forward).parameters:
        inputs["position_ids"] = position_ids
    return inputs
