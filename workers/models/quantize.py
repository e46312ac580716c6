"""Frozen linear layers in eight bits, and in four under LoRA adapters.

Int8 weights take a quarter of float32's memory, and their products are products of integers.

    module = empty_model(config, head, device)
    quantize_linears(module, device)        # before loading, so no float32 model is in memory
    load_weights(module, ...)               # each weight is quantized as it is read

Roles on CPUs that compute without training can use it: a native or hf engine, a frozen reference,
teacher or reward model (their `quantization=int8`). A weight [out, in] is stored as integers from
-127 to 127 and one scale per output channel. The inputs of a layer are quantized row by row, and
the products are integer sums, which are exact: the result of a row does not depend on other rows.

Embeddings, heads, stacked experts, routers, norms and biases are not quantized. The error differs
by class: the logits are wrong for models whose states decay by exponentials of rounded numbers
(jamba, qwen3_next), which are rejected.

QLoRA stores the frozen base under LoRA adapters in four bits by bitsandbytes:

    module = empty_model(config, head, device)
    quantize_base(module)           # before loading: each weight is quantized as it is read
    add_adapter(module, config)

A linear weight of the language half becomes 4-bit NormalFloat numbers and a float32 scale per 64
numbers: 4.5 bits per weight. bitsandbytes computes outputs and the gradients of inputs. Embeddings,
heads, routers, stacked experts, norms and biases keep the model's dtype. Dettmers et al., "QLoRA:
Efficient Finetuning of Quantized LLMs" (arXiv 2305.14314).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from verl_like.errors import ConfigError
from workers.config import ModelConfig
from workers.models.causal_lm import language_half, quantizable
from workers.models.support import Support

LARGEST = 127
"""Numbers range from -LARGEST to LARGEST."""
ROWS_AT_ONCE = 1024
"""Rows of a weight that are quantized at a time, to bound the memory."""


class QuantizedWeight(Tensor):
    """A weight [out, in] that reports a float dtype but is stored as integers and scales.

    `linear` uses the class's own product, and `copy_` into the weight quantizes. Any other
    operation sees the dequantized floats, and must not write to them.
    """

    numbers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(
        cls, numbers: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> Self:
        """Create a wrapper with the weight's shape, dtype and device, without memory of its own."""
        weight: Self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=numbers.device
        )
        return weight

    def __init__(
        self, numbers: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.numbers, self.scales = numbers, scales

    @classmethod
    def empty(cls, out_width: int, in_width: int, dtype: torch.dtype, device: Any) -> Self:
        """Allocate memory for a weight."""
        raise NotImplementedError

    def floats(self) -> Tensor:
        """Return the dequantized weight."""
        raise NotImplementedError

    def write(self, values: Tensor) -> None:
        """Quantize `values`, which have the weight's shape."""
        raise NotImplementedError

    def product_with(self, input: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        """Return `linear(input, self, bias)`."""
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.Size, torch.dtype]]:
        """Return the inner tensors; torch calls this when it moves a module."""
        return ["numbers", "scales"], (self.shape, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], context: tuple[torch.Size, torch.dtype], *_: Any
    ) -> Self:
        """Rebuild the weight from its inner tensors; torch calls this."""
        return cls(parts["numbers"], parts["scales"], *context)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `product_with`, before torch turns `linear` into a transposition and a product."""
        if func is linear and isinstance(args[1], QuantizedWeight):
            return args[1].product_with(args[0], *args[2:], **(kwargs or {}))
        if func is Tensor.detach:
            return args[0]  # it has no gradient; torch raises here under `inference_mode`
        with torch._C.DisableTorchFunctionSubclass():  # so that results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handle copies and empty weights; run any other operation on the dequantized floats."""
        kwargs, aten, first = kwargs or {}, torch.ops.aten, args[0]
        if func is aten.detach.default:
            return cls(first.numbers, first.scales, first.shape, first.dtype)
        if func is aten.empty_like.default:
            device = kwargs.get("device") or first.device
            out_width, in_width = first.shape
            return cls.empty(out_width, in_width, first.dtype, device)
        if func is aten.copy_.default and isinstance(first, QuantizedWeight):
            if args[1].shape != first.shape:
                raise ValueError(
                    f"values of shape {list(args[1].shape)} do not fit a quantized weight of shape "
                    f"{list(first.shape)}"
                )
            first.write(args[1])
            return first
        if func._schema.is_mutable and isinstance(first, QuantizedWeight):
            raise TypeError(
                f"{func} would write to a weight that is quantized. Write with copy_()."
            )

        plain = [arg.floats() if isinstance(arg, QuantizedWeight) else arg for arg in args]
        return func(*plain, **kwargs)


class Int8Weight(QuantizedWeight):
    """A weight whose `numbers` are int8, [in, out], the fastest layout for integer products.

    `scales` has one float32 number per output.
    """

    @classmethod
    def empty(cls, out_width: int, in_width: int, dtype: torch.dtype, device: Any) -> Self:
        """Allocate memory for a weight."""
        numbers = torch.empty(in_width, out_width, dtype=torch.int8, device=device)
        scales = torch.empty(out_width, device=device)
        return cls(numbers, scales, (out_width, in_width), dtype)

    def floats(self) -> Tensor:
        """Return the dequantized weight."""
        numbers = self.numbers.t().contiguous()
        return numbers.float().mul_(self.scales[:, None]).to(self.dtype)

    def write(self, values: Tensor) -> None:
        """Quantize `values` block by block; a non-finite value makes its row NaN."""
        rows = zip(
            values.split(ROWS_AT_ONCE),
            self.numbers.split(ROWS_AT_ONCE, dim=1),
            self.scales.split(ROWS_AT_ONCE),
            strict=True,
        )
        for row_values, numbers, scales in rows:
            row_numbers, row_scales = quantized(row_values.to(self.device))
            numbers.copy_(row_numbers.t())
            scales.copy_(row_scales[:, 0])

    def product_with(self, input: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        """Return a product of integers; it has no gradient."""
        return int8_linear(input, self, bias)

    def free(self) -> None:
        """Free the memory of the numbers and scales."""
        self.numbers, self.scales = self.numbers.new_empty(0, 0), self.scales.new_empty(0)

    def allocate(self) -> None:
        """Allocate memory for the numbers and scales; their values are undefined."""
        self.numbers = self.numbers.new_empty(self.shape[1], self.shape[0])
        self.scales = self.scales.new_empty(self.shape[0])


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return [rows, width] as int8, and the scale of each row, [rows, 1]."""
    rows = rows.float()
    largest = rows.abs().amax(dim=1, keepdim=True)
    scales = largest.clamp_(min=torch.finfo(torch.float32).tiny * LARGEST).div_(LARGEST)
    return (rows / scales).round_().to(torch.int8), scales


def int8_linear(input: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """Run `linear` with inputs [..., in] quantized row by row; it has no gradient."""
    if torch.is_grad_enabled() and input.requires_grad:
        raise TypeError(
            "int8 weights are for models that are not trained: they have no gradient. Leave out "
            "quantization, or run the model under torch.no_grad()."
        )
    numbers, scales = quantized(input.reshape(-1, input.shape[-1]))
    result = torch._int_mm(numbers, weight.numbers).float().mul_(scales).mul_(weight.scales)
    if bias is not None:
        result.add_(bias)
    return result.to(input.dtype).view(*input.shape[:-1], len(weight.scales))


def linears_of(module: Any, quantization: str) -> list[nn.Linear]:
    """Return the layers of `quantizable`; it is an error if there is none."""
    layers = [layer for _, layer in quantizable(module)]
    if not layers:
        raise ConfigError(
            f"quantization={quantization}: a model of type {module.config.model_type!r} has no "
            "linear layers (torch.nn.Linear) outside its head. Leave out quantization."
        )
    return layers


def quantize_linears(module: nn.Module, device: torch.device) -> None:
    """Make the weights of linear layers int8; each is quantized when it is written."""
    check_device(device.type)
    check_quantizable(module)
    for layer in linears_of(module, "int8"):
        make_room(layer, Int8Weight)


def check_quantizable(module: Any) -> None:
    """Reject a model without layers that can be int8, or one for which int8 is too inaccurate."""
    linears_of(module, "int8")
    support = Support.of(module.config)
    reason = support.why_not("int8")
    if reason:
        raise ConfigError(
            f"quantization=int8: a model of type {support.model_type!r} cannot be rounded to int8 "
            f"({reason}). Leave out quantization."
        )


def make_room(layer: nn.Linear, kind: type[QuantizedWeight]) -> None:
    """Replace the layer's weight with an empty weight of this kind."""
    weight = layer.weight
    out_width, in_width = weight.shape
    room = kind.empty(out_width, in_width, weight.dtype, weight.device)
    layer.weight = nn.Parameter(room, requires_grad=False)


def check_device(device_type: str) -> None:
    """Reject devices that are not known to multiply int8 exactly."""
    if device_type != "cpu":
        raise ConfigError(
            f"quantization=int8 works only on CPUs, and this role's device is {device_type}. "
            "Leave out quantization: on GPUs, weights that are not trained are bfloat16 by "
            "default. With actor_rollout_ref.rollout.name=vllm on GPUs, you can set "
            "actor_rollout_ref.rollout.quantization=fp8."
        )
    if not _is_exact():
        raise ConfigError(
            "quantization=int8: torch's product of int8 matrices is not exact on this processor. "
            "Leave out quantization."
        )


def is_quantized(module: nn.Module) -> bool:
    """True if the module has int8 weights, so that two ways to compute a row differ noticeably."""
    return any(isinstance(weight, Int8Weight) for weight in module.parameters())


@functools.cache
def _is_exact() -> bool:
    """True if the largest numbers are multiplied exactly.

    On processors without an int8 dot product, sums of pairs of products saturate.
    """
    left = torch.full((5, 96), LARGEST, dtype=torch.int8)
    right = torch.full((96, 40), -LARGEST, dtype=torch.int8)
    left[::2, ::3], right[::3, ::2] = -LARGEST, LARGEST - 1
    return torch.equal(torch._int_mm(left, right).long(), left.long() @ right.long())


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
