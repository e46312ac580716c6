"""Choose the transformers class of a model: the class that its folder names.

    cls = model_class(config)               # Gemma3ForConditionalGeneration, LlamaForCausalLM
    language = language_of(module)          # the part that text runs through

Models are published as `...ForConditionalGeneration`, with a vision tower, even if they are trained
on text. The published class has the published names of weights, so checkpoints, weight sync, vLLM
and exports use them. Rows of text run only through the language half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workers.models.state import named_state

MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that transformers' classes raise for unsupported requests."""


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


def base_of(module: Any) -> Any:
    """Return the model below the language-model head, with its vision tower."""
    base = module.base_model
    if base is not module:
        return base
    # Llama 4 names another base model than it has: return the owner of the embeddings
    embeddings = module.get_input_embeddings()
    owners = (part for part in module.modules() if embeddings in part.children())
    return next(owners, module)


def language_of(base: Any) -> Any:
    """Return the language half of a base model; the base model itself if it reads only text."""
    return base if base.config.get_text_config() is base.config else base.get_decoder()


def has_towers(module: Any) -> bool:
    """True if the class reads more than text, such as images."""
    return module.config.get_text_config() is not module.config


def tower_weights(module: Any) -> set[str]:
    """Return the names of weights that rows of text do not reach: vision and audio towers."""
    if not has_towers(module):
        return set()
    head = module.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(module).__name__} has no head over a vocabulary")
    language: list[nn.Module] = [language_of(base_of(module)), head]
    read = {id(weight) for part in language for _, weight in named_state(part)}
    return {name for name, weight in named_state(module) if id(weight) not in read}


def freeze_towers(module: Any) -> None:
    """Freeze the weights of vision and audio towers."""
    frozen = tower_weights(module)
    for name, weight in module.named_parameters():
        weight.requires_grad_(weight.requires_grad and name not in frozen)
