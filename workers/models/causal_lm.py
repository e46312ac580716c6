"""Build a Hugging Face causal LM with a token head or a scalar head, without weights.

A training engine calls `empty_model`, shards the result, and lets `workers.models.load` fill it, so
a rank allocates only its own shards. Dropout is always off. With dropout, the log-probs of one
policy would differ between two passes, and PPO's ratio would be noisy even without an update.

    language = language_of(module)          # the part that text runs through

Rows of text run only through the language half of a model with a vision tower.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.module import register_module_parameter_registration_hook

from verl_like.errors import ConfigError
from workers.config import ModelConfig
from workers.models.attention import resolve_attention
from workers.models.classes import build_class, model_class
from workers.models.folder import model_folder, read_hf_config
from workers.models.precision import precision_of
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


Head = Literal["token", "scalar", "score"]
"""The head of a model.

- token: the model's language-model head.
- scalar: one number per position. The head's weight is the folder's `score.weight` if the folder is
  a sequence classifier with one label, otherwise zeros.
- score: like scalar, but the folder must be such a classifier.
"""
ROUTERS = ("gate", "router")
"""Attribute names of the router in transformers' classes for blocks of experts."""


class Float32Linear(nn.Linear):
    """A linear layer that computes and returns float32, even if its weights have another dtype.

    Rounding a value to bfloat16 would change it by up to 0.4 %.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        """Map [..., in] to [..., out]."""
        return linear(input.float(), self.weight.float())


class ScalarHeadModel(nn.Module):
    """The body of a causal LM with a `Linear(hidden, 1)` head.

    Parameter names match Hugging Face's sequence classifiers (`model.…`, `score.weight`).
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.config = causal_lm.config
        self.supports_gradient_checkpointing: bool = causal_lm.supports_gradient_checkpointing
        self._no_split_modules = causal_lm._no_split_modules
        self._keys_to_ignore_on_load_unexpected = causal_lm._keys_to_ignore_on_load_unexpected
        self._keep_in_fp32_modules_strict = causal_lm._keep_in_fp32_modules_strict
        body = base_of(causal_lm)
        names = (name for name, child in causal_lm.named_modules() if child is body)
        self.base_model_prefix: str = next(names)
        owner: nn.Module = self
        *owners, last = self.base_model_prefix.split(".")
        for name in owners:
            owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        owner.add_module(last, body)
        hidden_size = causal_lm.get_input_embeddings().embedding_dim
        self.score = Float32Linear(hidden_size, 1, bias=False, dtype=causal_lm.dtype)
        if not self.score.weight.is_meta:
            nn.init.zeros_(self.score.weight)

    @property
    def body(self) -> Any:
        """The base model, without the language-model head."""
        return self.get_submodule(self.base_model_prefix)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head, under the name that transformers uses."""
        return self.score

    def forward(self, **inputs: Any) -> Tensor:
        """Return one scalar per position: [rows, width, 1]."""
        scores: Tensor = self.score(self.body(**inputs).last_hidden_state)
        return scores


def body_of(module: Any) -> Any:
    """Return the base model, without its token head or scalar head."""
    return module.body if isinstance(module, ScalarHeadModel) else base_of(module)


def language_half(module: Any) -> Any:
    """Return the part of the base model that rows of text run through."""
    return language_of(body_of(module))


def body_reads_images(module: Any) -> bool:
    """Return False if the class has its vision tower outside of its base model, as Llama 4 has."""
    return language_half(module) is not body_of(module)


def empty_model(config: ModelConfig, head: Head, device: torch.device) -> Any:
    """Return the module for the model in `config.path`, in evaluation mode.

    Its parameters are on the meta device; its buffers are on the CPU. It will compute on `device`.
    """
    precision = precision_of(config, device.type)
    folder = model_folder(config.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{config.path!r} is not a Hugging Face model folder (no config.json "
            "there); `verl-like make-tiny DIR` makes a tiny one in DIR/model."
        )

    try:
        hf_config = read_hf_config(folder)
        for part in {id(part): part for part in (hf_config, hf_config.get_text_config())}.values():
            for name, value in part.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        model_cls = model_class(hf_config)
        attention = resolve_attention(
            config.attn_implementation,
            device,
            precision.compute,
            model_cls,
            hf_config,
            f"{config.SECTION}.attn_implementation",
        )
        with _parameters_on_meta():
            model = build_class(hf_config, dtype=precision.weights, attn_implementation=attention)
            if config.freeze_vision_tower:
                freeze_towers(model)
            module = model if head == "token" else ScalarHeadModel(model)
    except (*MODEL_ERRORS, OSError) as error:
        raise ConfigError(
            f"cannot load the model {config.path!r} as a causal LM: {' '.join(str(error).split())}"
        ) from error

    can_recompute = model.supports_gradient_checkpointing
    if config.enable_gradient_checkpointing and not can_recompute:
        raise ConfigError(
            f"model type {hf_config.model_type} has no gradient checkpointing in the installed "
            f"transformers. Set {config.SECTION}.enable_gradient_checkpointing=false."
        )
    most = recomputed_layers(config, device.type, can_recompute)
    if most:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for number, layer in enumerate(checkpointed_layers(model)):
            layer.gradient_checkpointing = number < most
    return module.eval()


ALL_LAYERS = sys.maxsize


def recomputed_layers(config: ModelConfig, device_type: str, can_recompute: bool) -> int:
    """Return the number of layers, from the first, that run again in the backward pass.

    It may be larger than the model. The default is all on CUDA, if the model class supports it.
    """
    num_layers = config.enable_gradient_checkpointing
    if num_layers is None:
        num_layers = device_type == "cuda" and can_recompute
    return num_layers if type(num_layers) is int else ALL_LAYERS * num_layers


def checkpointed_layers(model: nn.Module) -> list[Any]:
    """Return the layers of the language model that can run again in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        part
        for part in language_half(model).modules()
        if isinstance(part, GradientCheckpointingLayer)
    ]


def set_training_mode(module: nn.Module) -> None:
    """Set training mode for checkpointed layers only.

    The modules inside them stay in evaluation mode: with `module.train()`, noise and sampling in
    the routing of experts would make the log-probs of an update differ from the old log-probs.
    """
    module.eval()
    for part in module.modules():
        part.training = bool(getattr(part, "gradient_checkpointing", False))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which parameters get no memory; buffers (rotary tables) are computed as usual."""
    from workers.cpu.allocator import free_immediately

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        # transformers must not initialize it: it has no memory
        empty._is_hf_initialized = True  # type: ignore[attr-defined]
        return empty

    # torch's annotation says that hooks return None, but torch uses the returned value
    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with free_immediately():
            yield
    finally:
        handle.remove()


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which the module calls this `forward` instead of its own; hooks still run."""
    attributes = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


def quantizable(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers, by name, whose weights `quantize_linears` turns into int8."""
    everywhere = (child._parameters.values() for child in module.modules())
    num_uses = Counter(id(weight) for weights in everywhere for weight in weights)
    find_head: Any = getattr(module, "get_output_embeddings", lambda: None)
    head = find_head()
    for name, child in module.named_modules():
        is_plain = type(child) is nn.Linear and child is not head
        if is_plain and num_uses[id(child.weight)] == 1 and name.rpartition(".")[2] not in ROUTERS:
            yield name, child
