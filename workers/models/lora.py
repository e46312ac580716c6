"""LoRA by `peft`: adapters inside the engine's module, and weights merged as if there were none.

After `add_adapter` only the adapters (and a critic's head) get gradients. What leaves the engine
(weight sync, checksums, exports) goes through `merged_tensors`: base + adapter under the base's own
names, made anew from the base each time, so that nothing accumulates over versions. A reference in
the actor's process scores with the actor's module inside `adapter_off`.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl_like.errors import ConfigError, nearest
from workers.models.adapters import PARTS, merged_weight
from workers.models.attention import say_once
from workers.models.causal_lm import ScalarHeadModel
from workers.models.tensor_files import AT_ONCE, FileWriter, write_model_file

if TYPE_CHECKING:
    from workers.config import ModelConfig

NAME = "default"
"""peft's name of the one adapter."""


def add_adapter(module: Any, config: ModelConfig) -> None:
    """Put adapters beside the linear layers of `config.target_modules`, and freeze the others.

    A scalar head is trained beside them.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"model.lora_rank={config.lora_rank} needs the package peft: pip install "
            "'verl-like[lora]'"
        ) from error

    has_scalar_head = isinstance(module, ScalarHeadModel)
    body = module.body if has_scalar_head else module
    linear = _linear_layers(module)
    target, whole = config.target_modules, body
    if target == "all-linear":
        target = _linear_layers_but_the_head(body)
    if not isinstance(target, str):
        target = list(target)
        if any(_is_taken_for_experts(body, name) for name in linear):
            whole = nn.ModuleList([body])  # so that peft does not see whose layers they are
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=target)
    with warnings.catch_warnings():
        # peft sets fan_in_fan_out right for GPT-2, and warns that it did
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        try:
            inject_adapter_in_model(lora, whole)
        except ValueError as error:
            asked = config.target_modules
            hint = nearest(asked if isinstance(asked, str) else asked[0], linear)
            raise ConfigError(
                f"model.target_modules={config.target_modules}: no adapter fits: {error}{hint} "
                f"The model's linear layers: {', '.join(linear)}; all-linear takes all but the "
                "head."
            ) from error

    adapted = adapted_layers(module)
    other = [name for name in adapted if not _is_linear(adapted[name].get_base_layer())]
    if other:
        raise ConfigError(
            f"model.target_modules: {', '.join(other[:5])} is no linear layer; name linear layers "
            "only."
        )

    if config.target_modules == "all-linear":
        _say_what_experts_lack(body)
    for name, parameter in module.named_parameters():
        is_head = has_scalar_head and name.startswith("score.")
        parameter.requires_grad_(is_adapter(name) or is_head)
        if is_adapter(name) and not parameter.is_meta:
            parameter.data.copy_(initial_value(name, parameter.shape))


def _linear_layers_but_the_head(body: Any) -> list[str]:
    head, modules = body.get_output_embeddings(), body.named_modules()
    return [name for name, child in modules if _is_linear(child) and child is not head]


def _is_taken_for_experts(body: Any, layer: str) -> bool:
    """Whether peft takes the name of a layer for the routed experts of the model's class."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a peft that has no such names
        return False
    from peft import LoraConfig

    lora = LoraConfig(target_modules=[layer])
    try:
        convert_peft_config_for_transformers(lora, body, None)
    except ValueError:  # of what it takes for fused it is given a part
        return True
    return layer not in lora.target_modules


def _say_what_experts_lack(body: Any) -> None:
    """A line for a mixture of experts, whose routed experts are no linear layers."""
    if any(".experts." in name for name, _ in body.named_parameters()):
        adapted = {name.rpartition(".")[2]: None for name in adapted_layers(body)}
        say_once(
            f"LoRA: all-linear of {body.config.model_type} is {', '.join(adapted)}; no adapter for "
            "routed experts."
        )


def initial_value(name: str, shape: torch.Size, seed: int | None = None) -> Tensor:
    """Return an adapter's first value, the same on every rank: A uniform as a linear layer, B zero.

    Adapters with a seed of their own differ from those without one.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    text = name if seed is None else f"{seed}:{name}"
    generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
    bound = 1.0 / math.sqrt(shape[1])
    return torch.rand(shape, generator=generator) * (2 * bound) - bound


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The layers that carry an adapter, by the name of the layer that they wrap."""
    return {name: child for name, child in module.named_modules() if hasattr(child, "lora_A")}


def merged_tensors(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors by parameter name -> each adapter added to its base, under the base's name.

    The sum is rounded to the base's own type: what a rollout of that type can hold. Inside
    `adapter_off`: the base.
    """
    layers = adapted_layers(module)
    parts: dict[str, Tensor] = {}  # of the layer whose last part has not come yet
    for name, tensor in tensors:
        prefix, kind = _split(name)
        layer = layers.get(prefix)
        if layer is None:
            yield name, tensor
        elif kind == "base_layer.weight":
            parts["base"] = tensor
        elif kind.startswith("lora_A"):
            parts["A"] = tensor
        elif kind.startswith("lora_B"):
            merged = _merge(layer, parts.pop("base"), parts.pop("A"), tensor)
            yield f"{prefix}.weight", merged
        else:
            yield f"{prefix}.{kind.removeprefix('base_layer.')}", tensor


def _merge(layer: Any, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if layer.disable_adapters:
        return base
    merged = merged_weight(base, a, b, layer.scaling[NAME], layer.fan_in_fan_out)
    return merged.to(layer.get_base_layer().weight.dtype).to(base.dtype)


def split_tensors(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors by parameter name -> adapters beside their base, under the names of `PARTS`.

    What else there is has the name that `merged_tensors` gives it.
    """
    layers = adapted_layers(module)
    for name, tensor in tensors:
        prefix, kind = _split(name)
        if prefix not in layers:
            yield name, tensor
        else:
            own = kind.removesuffix(f".{NAME}.weight").removeprefix("base_layer.")
            yield f"{prefix}.{own}", tensor


def adapter_parts(module: nn.Module) -> set[str]:
    """The names of what `split_tensors` takes apart."""
    return {f"{layer}.{part}" for layer in adapted_layers(module) for part in PARTS}


def adapter_facts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """By layer, what merges an adapter into its base: plain values, for another process."""
    facts: dict[str, dict[str, Any]] = {}
    for name, layer in adapted_layers(module).items():
        facts[name] = {
            "rank": layer.r[NAME],
            "alpha": layer.lora_alpha[NAME],
            "scaling": float(layer.scaling[NAME]),
            "transposed": bool(layer.fan_in_fan_out),
        }
    return facts


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Within, the module computes what its base computes."""
    layers = list(adapted_layers(module).values())
    for layer in layers:
        # peft's own switch would also take requires_grad from the adapters
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapter(
    folder: Path,
    module: Any,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    writer: FileWriter = AT_ONCE,
) -> None:
    """What is trained, in the form that `PeftModel.from_pretrained(base, folder)` loads.

    With a scalar head that is a sequence classifier with one label, whose head comes along.
    """
    from peft import LoraConfig

    folder.mkdir(parents=True, exist_ok=True)
    has_scalar_head = isinstance(module, ScalarHeadModel)
    stored = {}
    for name, tensor in tensors:
        peft_name = f"base_model.model.{name.replace(f'.{NAME}.', '.')}"
        stored[peft_name] = tensor
    # peft would load dense layers of some names as routed experts, but not their weights
    body = module.body if has_scalar_head else module
    by_name: dict[str, list[str]] = {}
    for layer in adapted_layers(module):
        by_name.setdefault(layer.rpartition(".")[2], []).append(layer)
    modules, weights = [], []
    for name, layers in by_name.items():
        if _is_taken_for_experts(body, name):
            weights += [f"{layer}.weight" for layer in layers]
        else:
            modules += layers
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=modules,
        target_parameters=weights or None,
        task_type="SEQ_CLS" if has_scalar_head else "CAUSAL_LM",
        modules_to_save=["score"] if has_scalar_head else None,
        base_model_name_or_path=config.path,
        inference_mode=True,
    )
    write_model_file(stored, folder / "adapter_model.safetensors", writer)
    lora.save_pretrained(str(folder))


def _split(name: str) -> tuple[str, str]:
    """`a.b.base_layer.weight` -> (`a.b`, `base_layer.weight`)."""
    for part in (".base_layer.", ".lora_A.", ".lora_B."):
        if part in name:
            prefix, _, rest = name.partition(part)
            return prefix, part[1:] + rest
    return name, ""


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def _linear_layers(module: nn.Module) -> list[str]:
    """The last parts of the names of linear layers, each once."""
    names = {}
    for name, child in module.named_modules():
        if _is_linear(child):
            names[name.rpartition(".")[2]] = None
    return list(names)


def _is_linear(child: Any) -> bool:
    """Not of a class that computes something else of its weight: an adapter would not fit."""
    from transformers.pytorch_utils import Conv1D

    others = ("Router", "GroupedLinear")
    return isinstance(child, nn.Linear | Conv1D) and not type(child).__name__.endswith(others)
