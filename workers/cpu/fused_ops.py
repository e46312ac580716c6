"""Linear layers, RMS norms, gated activations and rotary positions with own backward passes.

A training engine on a CPU enters `fused_ops`. Linear layers multiply through oneDNN, forwards and
backwards. Spelled out, each of the others is a chain of small operations, every one a pass over
memory forwards and several backwards; beside the matrix products of a small model that is a tenth
of an update. Here each is one function with the fewest passes.

They stand in for a model's own code only where that computes the same: a class is compared once
with the formula, value and gradients, on a few numbers, and must take the formula's arguments and
no other. What differs, is not float32, or rotates a part of the states only, runs as the model has
it. Only instances inside the given module are touched, never a class or a module of
another package.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from workers.cpu import onednn

ROTARY = "apply_rotary_pos_emb"
"""What transformers calls the function that rotates queries and keys, in every modeling file."""
GRADIENT_ROWS = 1024
"""Rows that are transposed at a time for a weight's gradient: they stay in the cache."""
MIN_MULTIPLICATIONS = 2**24
"""A linear layer with fewer is left to torch: building a kernel for its rows would take longer."""


class _Linear(torch.autograd.Function):
    """states @ weight.t() + bias.

    Of the two factors of the weight's gradient the narrower is transposed in memory.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = states.reshape(-1, states.shape[-1])
        ctx.save_for_backward(flat, weight)
        result: Tensor = torch.ops.aten._unsafe_view(
            onednn.linear(flat, weight, bias), [*states.shape[:-1], len(weight)]
        )
        return result  # no view in autograd's eyes: FSDP2 hangs its hooks on it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        flat, weight = ctx.saved_tensors
        grad_flat = grad.reshape(-1, grad.shape[-1])
        grad_states = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_states = onednn.linear(grad_flat, weight.t()).view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            grad_weight = _outer(grad_flat, flat)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_flat.sum(dim=0)
        return grad_states, grad_weight, grad_bias


def _outer(grad: Tensor, states: Tensor) -> Tensor:
    """grad.t() @ states, some rows at a time; of the two the narrower is transposed in memory."""
    grad_is_narrow = grad.shape[1] <= states.shape[1]
    narrow, wide = (grad, states) if grad_is_narrow else (states, grad)

    total: Tensor | None = None
    for few, many in zip(narrow.split(GRADIENT_ROWS), wide.split(GRADIENT_ROWS), strict=True):
        few = few.t().contiguous()
        if total is None:
            total = onednn.linear(few, many.t())
        else:
            total = onednn.linear_binary("add", total, few, many.t())

    assert total is not None, "a batch has rows"
    return total if grad_is_narrow else total.t().contiguous()


class _RmsNorm(torch.autograd.Function):
    """x / sqrt(mean of x squared + eps) * weight, along the last dim."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = states.reshape(-1, states.shape[-1])
        norm = torch.linalg.vector_norm(flat, dim=-1, keepdim=True)
        inverse = norm.square_().div_(flat.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(flat, weight, inverse)
        normed: Tensor = torch.ops.aten._unsafe_view((flat * inverse).mul_(weight), states.shape)
        return normed  # no view in autograd's eyes: a router's jitter writes over it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        flat, weight, inverse = ctx.saved_tensors
        grad_flat = grad.reshape(flat.shape)
        product = grad_flat * flat
        along = torch.mv(product, weight)[:, None].mul_(inverse.pow(3)).div_(-flat.shape[-1])
        grad_weight = torch.mv(product.t(), inverse[:, 0])
        grad_states = torch.mul(grad_flat, weight, out=product).mul_(inverse).addcmul_(flat, along)
        return grad_states.view(grad.shape), grad_weight, None


class _Gated(torch.autograd.Function):
    """silu(gate) * up.

    Backward writes over what forward kept: nobody else reads the outputs of the two projections.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        active = functional.silu(gate)
        ctx.save_for_backward(gate, up, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, active = ctx.saved_tensors
        grad_active = up.mul_(grad)
        grad_gate = torch.ops.aten.silu_backward.grad_input(grad_active, gate, grad_input=gate)
        return grad_gate, active.mul_(grad)


class _Rotated(torch.autograd.Function):
    """states * cos + (second half negated, first half) * sin, along the last dim."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = states.shape[-1] // 2
        rotated = states * cos
        rotated[..., :half].addcmul_(states[..., half:], sin[..., :half], value=-1)
        rotated[..., half:].addcmul_(states[..., :half], sin[..., half:])
        return rotated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        rotated = grad * cos
        rotated[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        rotated[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return rotated, None, None


_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _Linear.apply
_rms_norm: Callable[[Tensor, Tensor, float], Tensor] = _RmsNorm.apply
_gated: Callable[[Tensor, Tensor], Tensor] = _Gated.apply
_rotated: Callable[[Tensor, Tensor, Tensor], Tensor] = _Rotated.apply


@contextmanager
def fused_ops(module: nn.Module) -> Iterator[None]:
    """Within, this file computes the parts of `module` that it knows; a backward pass, too.

    Each such part gets a `forward` of its own, which shadows that of its class and goes in the end.
    """
    with ExitStack() as stack:
        for child in module.modules():
            forward = _forward_for(child)
            if forward is not None and "forward" not in vars(child):
                child.forward = MethodType(forward, child)
                stack.callback(delattr, child, "forward")
        yield


def _forward_for(child: nn.Module) -> Callable[..., Any] | None:
    """What computes the same as this module's class, faster; None if nothing here does."""
    if type(child) is nn.Linear:
        return _linear_forward

    own_weights = [name for name, _ in child.named_parameters(recurse=False)]
    if hasattr(child, "variance_epsilon") and own_weights == ["weight"]:
        return _norm_forward if _is_norm(type(child)) else None

    if all(hasattr(child, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return _mlp_forward if _is_gated_mlp(type(child), type(child.act_fn)) else None

    return _attention_forward(type(child))


def _linear_forward(module: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
    weight, bias = module.weight, module.bias
    fits = input.dtype == weight.dtype and not torch.is_autocast_enabled(input.device.type)
    is_plain = onednn.supports(weight) and not isinstance(weight, DTensor)
    is_worth_it = input.numel() * len(weight) >= MIN_MULTIPLICATIONS

    compute = _linear if fits and is_plain and is_worth_it else functional.linear
    return compute(input, weight, bias)


def _norm_forward(module: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != torch.float32 or module.weight.dtype != torch.float32:
        result: Tensor = type(module).forward(module, hidden_states)
        return result
    return _rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _mlp_forward(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    if gate.dtype == up.dtype == torch.float32:
        active = _gated(gate, up)
    else:
        active = module.act_fn(gate) * up

    result: Tensor = module.down_proj(active)
    return result


def _attention_forward(cls: type[nn.Module]) -> Callable[..., Any] | None:
    """The class's own `forward`, where it rotates by halves, with the rotation of this file.

    It finds that function among its module's globals; so the copy gets globals of its own, and the
    module is left as it is.
    """
    forward = cls.forward
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    original = forward.__globals__.get(ROTARY)
    if original is None or not _is_rotary(original):
        return None

    names = {**forward.__globals__, ROTARY: _rotary_in_place_of(original)}
    copy = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@functools.cache
def _is_norm(cls: type[nn.Module]) -> bool:
    """Whether this class divides by the root mean square and multiplies by its weight.

    A norm that may be given a gate as well is another formula.
    """
    if not _takes_states_alone(cls):
        return False
    weight = _numbers(8, start=1.0)
    stand_in = SimpleNamespace(weight=weight, variance_epsilon=0.1)
    theirs: Callable[..., Any] = lambda states: cls.forward(stand_in, states)  # noqa: E731
    return _agree(theirs, lambda states: _rms_norm(states, weight, 0.1), [_numbers(3, 8)], [weight])


@functools.cache
def _is_gated_mlp(cls: type[nn.Module], activation: type[nn.Module]) -> bool:
    """Whether this class is down(silu(gate(x)) * up(x)) and nothing else."""
    if not _takes_states_alone(cls):
        return False
    weights = {
        "gate_proj": _numbers(8, 4),
        "up_proj": _numbers(8, 4, start=0.3),
        "down_proj": _numbers(4, 8),
    }
    layers = {
        name: functools.partial(functional.linear, weight=weight)
        for name, weight in weights.items()
    }

    def theirs(x: Tensor) -> Any:
        stand_in: Any = SimpleNamespace(**layers, act_fn=activation())
        return cls.forward(stand_in, x)

    def ours(x: Tensor) -> Tensor:
        return layers["down_proj"](_gated(layers["gate_proj"](x), layers["up_proj"](x)))

    return _agree(theirs, ours, [_numbers(3, 4)], list(weights.values()))


def _takes_states_alone(cls: type[nn.Module]) -> bool:
    """Whether `forward` has one parameter beside the module."""
    return len(inspect.signature(cls.forward).parameters) == 2


@functools.cache
def _is_rotary(original: Callable[..., Any]) -> bool:
    """Whether this function rotates queries and keys by halves, with transformers' parameters."""
    parameters = inspect.signature(original).parameters
    if list(parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    defaults = [parameter.default for parameter in parameters.values()]
    if defaults != [inspect.Parameter.empty] * 4 + [1]:
        return False

    cos, sin = _numbers(1, 3, 8, start=0.1), _numbers(1, 3, 8, start=0.7)
    states = [_numbers(1, 4, 3, 8), _numbers(1, 2, 3, 8, start=0.5)]
    own = _rotary_in_place_of(original)
    return _agree(
        lambda q, k: torch.cat(original(q, k, cos, sin), dim=1),
        lambda q, k: torch.cat(own(q, k, cos, sin), dim=1),
        states,
        [],
    )


def _rotary_in_place_of(original: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function that rotates float32 by this file's formula.

    Other types, and states wider than the angles, are left to `original`.
    """

    def rotary(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        is_float = q.dtype == k.dtype == cos.dtype == torch.float32
        if not (is_float and q.shape[-1] == k.shape[-1] == cos.shape[-1]):
            rotated: tuple[Tensor, Tensor] = original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            return rotated
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    return rotary


def _numbers(*shape: int, start: float = 0.0) -> Tensor:
    """Some numbers within ±1, without the process's random state."""
    count = int(torch.Size(shape).numel())
    numbers = (torch.arange(count, dtype=torch.float32) * 0.7 + start).sin()
    return numbers.view(shape).requires_grad_()


def _agree(
    theirs: Callable[..., Any],
    ours: Callable[..., Tensor],
    inputs: list[Tensor],
    weights: list[Tensor],
) -> bool:
    """Whether both give the same value and gradients.

    A class that does not run on a stand-in for itself does not.
    """
    results: list[list[Tensor]] = []
    with torch.enable_grad():
        for function in (theirs, ours):
            try:
                value = function(*inputs)
                loss = (value * _numbers(*value.shape, start=0.2).detach()).sum()
                grads = torch.autograd.grad(loss, inputs + weights)
            except (AttributeError, TypeError, ValueError, RuntimeError):
                return False
            results.append([value, *grads])

    pairs = zip(*results, strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs)
