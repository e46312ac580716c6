"""LoRA with `peft`: adapters in the engine's module, and merged weights outside it.

After `add_adapter` only the adapters (and a scalar head) get gradients. `merged_tensors` yields
base + adapter under the base's names, for weight sync, checksums and exports. It computes the sum
from the base each time, so that no error accumulates over versions. A reference in the actor's
process scores with the actor's module inside `adapter_off`.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl_like.errors import ConfigError, nearest
from workers.config import ModelConfig
from workers.models.attention import log_once
from workers.models.causal_lm import ScalarHeadModel, has_towers, language_half
from workers.models.quantize import NF4Weight
from workers.models.state import Named, is_adapter
from workers.models.tensor_files import WRITE_NOW, FileWriter, write_model_file

NAME = "default"
"""peft's name of the only adapter."""


def add_adapter(module: Any, config: ModelConfig) -> None:
    """Add adapters to the linear layers of `config.target_modules`, and freeze the other weights.

    A scalar head is trained as well.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"LoRA (lora_rank={config.lora_rank}) needs the package peft. Install it with: pip "
            "install 'verl-like[lora]'"
        ) from error

    has_scalar_head = isinstance(module, ScalarHeadModel)
    body, language = (module.body if has_scalar_head else module), language_half(module)
    if has_towers(module):
        body = language  # adapters fit only the half that text runs through
    names = [name for name, child in body.named_modules() if _is_linear(child)]
    linear = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    target, container = config.target_modules, body
    if target == "all-linear":
        head, modules = module.get_output_embeddings(), body.named_modules()
        target = [name for name, child in modules if _is_linear(child) and child is not head]
    if not isinstance(target, str):
        target = list(target)
        if any(_is_taken_for_experts(body, name) for name in linear):
            container = nn.ModuleList([body])  # so that peft does not recognize the model class
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=target)
    with warnings.catch_warnings():
        # peft sets fan_in_fan_out correctly for GPT-2, and warns about it
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        try:
            inject_adapter_in_model(lora, container)
        except ValueError as error:
            targets = config.target_modules
            hint = nearest(targets if isinstance(targets, str) else next(iter(targets), ""), linear)
            raise ConfigError(
                f"{config.SECTION}.target_modules={config.target_modules}: no adapter fits: "
                f"{error}{hint} The model's linear layers: {', '.join(linear)}; all-linear "
                "selects all but the head."
            ) from error

    adapted = adapted_layers(module)
    other = [name for name in adapted if not _is_linear(adapted[name].get_base_layer())]
    if other:
        raise ConfigError(
            f"{config.SECTION}.target_modules selects {', '.join(other[:5])}, but only linear "
            f"layers can have adapters. Select only linear layers, such as {', '.join(linear[:3])}."
        )

    if config.target_modules == "all-linear":
        # the routed experts of a mixture are not linear layers
        if any(".experts." in name for name, _ in body.named_parameters()):
            kinds = dict.fromkeys(name.rpartition(".")[2] for name in adapted_layers(body))
            log_once(
                f"LoRA: all-linear of {body.config.model_type} selects {', '.join(kinds)}; routed "
                "experts get no adapter."
            )
    for name, parameter in module.named_parameters():
        is_head = has_scalar_head and name.startswith("score.")
        parameter.requires_grad_(is_adapter(name) or is_head)
        if is_adapter(name) and not parameter.is_meta:
            parameter.data.copy_(initial_value(name, parameter.shape))


def _is_taken_for_experts(body: Any, layer: str) -> bool:
    """True if peft treats this layer name as the routed experts of the model's class."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # this version of peft does not treat any names specially
        return False
    from peft import LoraConfig

    lora = LoraConfig(target_modules=[layer])
    try:
        convert_peft_config_for_transformers(lora, body, None)
    except ValueError:  # peft got only part of the weights that it treats as fused
        return True
    return layer not in (lora.target_modules or ())


def initial_value(name: str, shape: torch.Size, seed: int | None = None) -> Tensor:
    """Return the initial value of an adapter tensor, equal on every rank: A uniform, B zero.

    Different seeds give different values of A.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    text = name if seed is None else f"{seed}:{name}"
    generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
    bound = 1.0 / math.sqrt(shape[1])
    return torch.rand(shape, generator=generator) * (2 * bound) - bound


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter, by the name of the layer that they wrap."""
    return {name: child for name, child in module.named_modules() if hasattr(child, "lora_A")}


def merged_tensors(module: nn.Module, tensors: Named) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors with each adapter added to its base, under the base's name.

    The sum is rounded to the base's dtype, which is what a rollout in that dtype can store. Inside
    `adapter_off`, the base is yielded without the adapter.
    """
    layers = adapted_layers(module)
    parts: dict[str, Tensor] = {}  # the parts of a layer that have arrived, until it is complete
    for name, weight in tensors:
        tensor = weight.floats() if isinstance(weight, NF4Weight) else weight
        prefix, kind = _split(name)
        layer = layers.get(prefix)
        if layer is None:
            yield name, tensor
        elif kind == "base_layer.weight":
            parts["base"] = tensor
        elif kind.startswith("lora_A"):
            parts["A"] = tensor
        elif kind.startswith("lora_B"):
            base, a = parts.pop("base"), parts.pop("A")
            if not layer.disable_adapters:
                merged = merged_weight(base, a, tensor, layer.scaling[NAME], layer.fan_in_fan_out)
                base = merged.to(layer.get_base_layer().weight.dtype).to(base.dtype)
            yield f"{prefix}.weight", base
        else:
            yield f"{prefix}.{kind.removeprefix('base_layer.')}", tensor


def split_tensors(module: nn.Module, tensors: Named) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors with adapters and bases separate, under the names of `PARTS`.

    All other tensors have the same names as in `merged_tensors`.
    """
    layers = adapted_layers(module)
    for name, weight in tensors:
        tensor = weight.floats() if isinstance(weight, NF4Weight) else weight
        prefix, kind = _split(name)
        if prefix not in layers:
            yield name, tensor
        else:
            part = kind.removesuffix(f".{NAME}.weight").removeprefix("base_layer.")
            yield f"{prefix}.{part}", tensor


def adapter_parts(module: nn.Module) -> set[str]:
    """Return the names of the separate tensors of `split_tensors`."""
    return {f"{layer}.{part}" for layer in adapted_layers(module) for part in PARTS}


def adapter_layout(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what another process needs to merge the adapter of each layer, as plain values."""
    layout: dict[str, dict[str, Any]] = {}
    for name, layer in adapted_layers(module).items():
        layout[name] = {
            "rank": layer.r[NAME],
            "alpha": layer.lora_alpha[NAME],
            "scaling": float(layer.scaling[NAME]),
            "transposed": bool(layer.fan_in_fan_out),
        }
    return layout


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Context in which the module computes without its adapters."""
    layers = list(adapted_layers(module).values())
    for layer in layers:
        # peft's switch would also clear requires_grad of the adapters
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
    tensors: Named,
    writer: FileWriter = WRITE_NOW,
) -> None:
    """Write the trained weights in the format that `PeftModel.from_pretrained(base, folder)` loads.

    A model with a scalar head becomes a sequence classifier with one label, and the head is
    included.
    """
    from peft import LoraConfig

    folder.mkdir(parents=True, exist_ok=True)
    has_scalar_head = isinstance(module, ScalarHeadModel)
    stored = {}
    for name, tensor in tensors:
        peft_name = f"base_model.model.{name.replace(f'.{NAME}.', '.')}"
        stored[peft_name] = tensor
    # peft would treat dense layers with some names as routed experts, and skip their weights
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
    """Split `a.b.base_layer.weight` into (`a.b`, `base_layer.weight`)."""
    for part in (".base_layer.", ".lora_A.", ".lora_B."):
        if part in name:
            prefix, _, rest = name.partition(part)
            return prefix, part[1:] + rest
    return name, ""


def _is_linear(child: Any) -> bool:
    """True for plain linear layers; adapters do not fit layers that use a weight differently."""
    from transformers.pytorch_utils import Conv1D

    others = ("Router", "GroupedLinear")
    return isinstance(child, nn.Linear | Conv1D) and not type(child).__name__.endswith(others)


PARTS = ("weight", "lora_A", "lora_B")
"""Names of the tensors of an adapted layer: the base weight and two factors, `layer.<part>`."""


def merged_weight(base: Tensor, a: Tensor, b: Tensor, scaling: float, transposed: bool) -> Tensor:
    """Return base + scaling * b @ a in float32; `transposed` if the base is [in, out]."""
    delta = scaling * (b.float() @ a.float())
    return base.float() + (delta.T if transposed else delta)


def shapes_differ(base: Tensor, a: Tensor, b: Tensor, transposed: bool) -> bool:
    """True if the shapes of base and factors do not fit together."""
    out_by_in = base.shape[::-1] if transposed else base.shape
    return (b.shape[0], a.shape[1]) != tuple(out_by_in) or b.shape[1] != a.shape[0]
