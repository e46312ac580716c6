"""QLoRA: the frozen base under LoRA adapters, stored in four bits by bitsandbytes.

    module = empty_model(config, head, device)
    quantize_base(module)           # before loading: each weight is quantized as it is read
    add_adapter(module, config)

A linear weight of the language half becomes 4-bit NormalFloat numbers and a float32 scale per 64
numbers: 4.5 bits per weight. bitsandbytes computes outputs and the gradients of inputs. Embeddings,
heads, routers, stacked experts, norms and biases keep the model's dtype. Dettmers et al., "QLoRA:
Efficient Finetuning of Quantized LLMs" (arXiv 2305.14314).
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from verl_like.errors import ConfigError
from workers.config import ModelConfig
from workers.models.causal_lm import language_half
from workers.models.quantize import QuantizedWeight, linears_of, make_room

BLOCK = 64
"""Consecutive weights that share a scale."""


class NF4Weight(QuantizedWeight):
    """A weight whose `numbers` hold two 4-bit numbers per byte; `scales` has one number per block.

    The dtype is the dtype of the dequantized floats. A cast changes only that.
    """

    @classmethod
    def empty(cls, out_width: int, in_width: int, dtype: torch.dtype, device: Any) -> Self:
        """Allocate memory for a weight."""
        size = out_width * in_width
        numbers = torch.empty((size + 1) // 2, 1, dtype=torch.uint8, device=device)
        scales = torch.empty(-(-size // BLOCK), device=device)
        return cls(numbers, scales, (out_width, in_width), dtype)

    @property
    def state(self) -> Any:
        """The weight's description, as bitsandbytes wants it."""
        library = bitsandbytes().functional
        code = library.get_4bit_type("nf4", device=self.device)
        return library.QuantState(self.scales, self.shape, code, BLOCK, "nf4", self.dtype)

    def floats(self) -> Tensor:
        """Return the dequantized weight."""
        if self.is_meta:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        floats: Tensor = bitsandbytes().functional.dequantize_4bit(self.numbers, self.state)
        return floats

    def write(self, values: Tensor) -> None:
        """Quantize `values`."""
        floats = values.to(self.device, torch.float32).contiguous()
        numbers, state = bitsandbytes().functional.quantize_4bit(
            floats, blocksize=BLOCK, quant_type="nf4"
        )
        self.numbers.copy_(numbers)
        self.scales.copy_(state.absmax)

    def product_with(self, input: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        """Return `linear(input, self, bias)`; gradients reach the input and the bias."""
        product: Tensor = bitsandbytes().matmul_4bit(input, self.numbers, self.state, bias=bias)
        return product

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Cast without dequantizing; the rest is as in the base class."""
        if func is not torch.ops.aten._to_copy.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        weight, kwargs = args[0], kwargs or {}
        device = kwargs.get("device") or weight.device
        parts = weight.numbers.to(device), weight.scales.to(device)
        return cls(*parts, weight.shape, kwargs.get("dtype") or weight.dtype)


def bitsandbytes() -> Any:
    """Import the library, which takes seconds and is optional."""
    import bitsandbytes as library

    return library


def quantize_base(module: Any) -> None:
    """Make the linear weights of the language half 4-bit; each is quantized when it is written."""
    for layer in linears_of(language_half(module), "nf4"):
        make_room(layer, NF4Weight)


def check_nf4(config: ModelConfig) -> None:
    """Reject settings of a model that do not work with a 4-bit base, or a missing package."""
    if config.quantization is None:
        return
    key, section = f"{config.SECTION}.quantization={config.quantization}", config.SECTION
    if config.lora_rank == 0:
        raise ConfigError(
            f"{key} with {section}.lora_rank=0: 4-bit weights cannot be trained, only adapters on "
            f"them. Set {section}.lora_rank, for example to 16, or leave out quantization."
        )
    if config.compile == "on":
        raise ConfigError(
            f"{key} with {section}.compile=on: bitsandbytes computes the products of the base. "
            "Leave out one of the keys."
        )
    try:
        bitsandbytes()
    except ImportError as error:
        raise ConfigError(
            f"{key} needs the package bitsandbytes. Install it with: pip install "
            "'verl-like[quantization]'"
        ) from error
