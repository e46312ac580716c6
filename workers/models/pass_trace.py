"""Trace, on the meta device, the bytes that a pass needs in addition to the weights.

    trace = trace_pass(body)
    trace.shapes(tp).saved              # bytes per token that autograd saves in the whole body
    trace.shapes(tp).layer              # the peak of a layer's forward and backward pass

A layer is traced operation by operation. Temporaries, gradients of activations and float32 norms
count while they are alive; memory that a kernel uses internally does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from workers.models.attention import override_attention

TRACED_ATTENTION = "counted_attention"
"""Name of `_attention` in the attention interface of transformers."""
NUM_TRACED = 257
"""Tokens in the traced pass. Bytes are proportional to it, and no weight has this size."""
NOT_TRACED = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
"""Errors that a pass raises if its operations depend on values, such as a router's choices."""


@dataclass(frozen=True)
class PassShapes:
    """Bytes per token that a pass over the body needs, without the weights."""

    saved: int
    """Bytes that autograd saves."""
    outside_layers: int
    """The part of `saved` that is saved before the first layer or after the last."""
    layer: int
    """Peak of a layer's forward and backward pass, without its input."""
    backward: int
    """Peak of a layer's backward pass, in addition to the saved tensors."""
    unsaved: int
    """Peak of a layer in a pass without gradients, without its input."""
    layer_inputs: int
    """Other inputs that every layer gets, such as rotary angles."""


@dataclass(frozen=True)
class Bytes:
    """Bytes of all traced tokens, in tensors that tp does not split and in tensors that it does."""

    replicated: int = 0
    cut: int = 0

    def of(self, tp: int = 1) -> int:
        """Return the bytes per token on one of `tp` ranks."""
        return -(-(self.replicated + self.cut // tp) // NUM_TRACED)


@dataclass(frozen=True)
class LayerTrace:
    """Bytes that are alive after each operation in passes of a layer, without the layer's input."""

    forward: list[Bytes]
    """The last are the bytes that are saved for the backward pass, including the output."""
    backward: list[Bytes]
    unsaved: list[Bytes]
    """Bytes of a forward pass without a backward pass."""


def _total(sizes: Collection[Bytes]) -> Bytes:
    return Bytes(sum(size.replicated for size in sizes), sum(size.cut for size in sizes))


@dataclass(frozen=True)
class PassTrace:
    """The traced pass of a model's body."""

    saved: Bytes
    """Bytes that autograd saves in the whole body."""
    saved_in_layers: Bytes
    layer_inputs: Bytes
    """Bytes of the inputs that every layer gets besides hidden states, such as rotary angles."""
    layer: LayerTrace
    """The layer with the highest peak."""

    def shapes(self, tp: int) -> PassShapes:
        """Return the bytes per token on one rank of `tp`, which splits heads and MLP hidden sizes.

        Hidden states are whole on every rank.
        """
        forward = [moment.of(tp) for moment in self.layer.forward]
        backward = [moment.of(tp) for moment in self.layer.backward]
        return PassShapes(
            saved=self.saved.of(tp),
            outside_layers=max(0, self.saved.of(tp) - self.saved_in_layers.of(tp)),
            layer=max(forward + backward),
            backward=max(0, max(backward) - forward[-1]),
            unsaved=max(moment.of(tp) for moment in self.layer.unsaved),
            layer_inputs=self.layer_inputs.of(tp),
        )


def trace_pass(body: Any) -> PassTrace | None:
    """Trace a pass of the body; return None if that is not possible."""
    hidden_size = body.config.get_text_config().hidden_size
    names = set(body._no_split_modules or ())
    layers = [child for child in body.modules() if type(child).__name__ in names]
    inputs: dict[Any, tuple[Any, Any]] = {}

    def note(layer: Any, args: Any, kwargs: Any) -> None:
        inputs[layer] = args, kwargs

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with override_attention(body, TRACED_ATTENTION, _attention, lambda **_: None):
            saved = _sum(_saved(body), hidden_size)
            for hook in hooks:
                hook.remove()
            known: dict[Any, LayerTrace] = {}
            kinds = [_kind(layer) for layer in layers if layer in inputs]
            for layer, kind in zip(inputs, kinds, strict=True):
                if kind not in known:
                    known[kind] = _trace_layer(layer, *inputs[layer], hidden_size)
    except NOT_TRACED:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    if not known:
        return None
    return PassTrace(
        saved,
        _total([known[kind].forward[-1] for kind in kinds]),
        _sum(tensors_in(list(inputs[layers[0]][1].values())), hidden_size),
        max(known.values(), key=lambda layer: max(m.of() for m in layer.forward + layer.backward)),
    )


def _kind(layer: Any) -> Any:
    """Return a key; layers with equal keys need the same memory."""
    weights = tuple((w.shape, w.requires_grad) for w in layer.parameters())
    return type(layer), getattr(layer, "attention_type", None), weights


def _trace_layer(layer: Any, args: Any, kwargs: Mapping[str, Any], hidden_size: int) -> LayerTrace:
    states = args[0].detach()
    trained = states.clone().requires_grad_()
    weights = list(layer.parameters())
    with torch.no_grad(), Alive(hidden_size, weights) as unsaved:
        layer(states, *args[1:], **kwargs)
    with Alive(hidden_size, weights) as alive:
        output = layer(trained, *args[1:], **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        num_forward = len(alive.moments)
        inside = [w for w in weights if w.requires_grad]
        torch.autograd.grad(output, [trained, *inside], torch.empty_like(output), allow_unused=True)
    return LayerTrace(alive.moments[:num_forward], alive.moments[num_forward:], unsaved.moments)


class Alive(TorchDispatchMode):
    """Record, after every operation, the bytes of results that are still alive.

    Results with the shape of a weight are gradients of weights. Their size does not depend on the
    number of tokens, so they are left out.
    """

    def __init__(self, hidden_size: int, weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden_size = hidden_size
        self.moments: list[Bytes] = []
        self._left_out = {_storage(weight) for weight in weights}
        self._shapes = {shape for w in weights for shape in (w.shape, w.shape[::-1])}
        self._alive: dict[StorageWeakRef, Bytes] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_storage(tensor) for tensor in tensors_in([args, list((kwargs or {}).values())])}
        for tensor in tensors_in(result):
            storage = _storage(tensor)
            is_new = storage not in inputs and storage not in self._left_out
            if is_new and tensor.shape not in self._shapes:
                self._alive.setdefault(storage, _size(tensor, self.hidden_size))
        self._alive = {s: size for s, size in self._alive.items() if not s.expired()}
        self.moments.append(_total(self._alive.values()))
        return result


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of nested lists and tuples."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [tensor for part in tree for tensor in tensors_in(part)]
    return []


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _size(tensor: Tensor, hidden_size: int) -> Bytes:
    are_states = tensor.dim() <= 3 and tensor.shape[-1:] == (hidden_size,)
    num_bytes = tensor.untyped_storage().nbytes()
    return Bytes(num_bytes, 0) if are_states else Bytes(0, num_bytes)


def _sum(tensors: Sequence[Tensor], hidden_size: int) -> Bytes:
    of_storages = {_storage(tensor): tensor for tensor in tensors}
    return _total([_size(tensor, hidden_size) for tensor in of_storages.values()])


def _saved(module: Any) -> list[Tensor]:
    """Return the tensors that a pass of `NUM_TRACED` tokens saves, without weights."""
    weights = {weight.untyped_storage()._cdata for weight in module.parameters()}
    ids = torch.zeros(1, NUM_TRACED, dtype=torch.long, device="meta")
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return list(saved.values())


class _FusedAttention(torch.autograd.Function):
    """Saves the inputs and outputs that a fused kernel saves, without computing attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, tokens, _ = query.shape
        output = query.new_empty(rows, tokens, heads, value.shape[-1])
        log_norm = query.new_empty(rows, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_norm)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _FusedAttention.apply(query, key, value), None  # type: ignore[no-untyped-call]
