"""Find the transformers class of a model, and build it.

    cls = model_class(config)               # Gemma3ForConditionalGeneration, LlamaForCausalLM

The class is the one that the model's folder names. Models are published as
`...ForConditionalGeneration`, with a vision tower, even if they are trained on text. The published
class has the published names of weights, so checkpoints, weight sync, vLLM and exports use them.
"""

from __future__ import annotations

from typing import Any

import torch


def model_class(config: Any) -> Any:
    """Return the class that the config names in `architectures`, or that of its model type.

    Raise a ValueError if the installed transformers has no generative class for the model type.
    """
    known = generative_classes(config)
    if not known:
        raise ValueError(
            f"the installed transformers has no causal LM for model type {config.model_type!r}"
        )
    named = [cls for cls in known if cls.__name__ in (config.architectures or ())]
    return (named or known)[0]


def generative_classes(config: Any) -> list[Any]:
    """Return transformers' generative classes of a model type."""
    from transformers.models.auto import modeling_auto as auto

    known: list[Any] = []
    for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        classes = mapping.get(type(config), ())
        known += classes if isinstance(classes, list | tuple) else [classes]
    return list(dict.fromkeys(known))


def build_class(config: Any, **settings: Any) -> Any:
    """Return a model of the class, with weights as transformers initializes them."""
    return model_class(config)._from_config(config, **settings)


def meta_class(config: Any) -> Any:
    """Return a model of the class on the meta device."""
    with torch.device("meta"):
        return build_class(config)
