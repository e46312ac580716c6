"""The forward pass of Llama-shaped models from the module's own weights, in few operations. For `native_rollout`.

A small step through transformers' modules costs more in calls than in arithmetic. `DirectForward` does the same sums on
the same tensors (nothing is copied) with the results of a step in kept buffers. `is_llama_shaped` says which modules it
understands; `agrees` compares the two passes on a few tokens, once per engine. Everything else, LoRA layers and hooked
or patched modules too, decodes by `ModuleForward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from workers.engines.slot_cache import SlotCache, Slots, heads_of, slot_width

SHAPES = {name: f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
"""Prefix of transformers' classes -> the model: grouped attention, rotary halves, RMS norms, a gated feed-forward."""
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone."""

_Turns = tuple[Tensor, Tensor]
"""For every token the cosines, once per head (products of equal shapes are several times as fast), and the sines."""
LANES = 32
"""Numbers that an exponential takes at a time; the rest of a tensor, if any, is computed in another way."""


def is_llama_shaped(module: Any) -> bool:
    """Whether every part of the module is one that `DirectForward` computes, with nothing hooked or patched in."""
    prefix = next((prefix for prefix, name in SHAPES.items() if type(module).__name__ == name), None)
    if prefix is None or not type(module).__module__.startswith("transformers.models."):
        return False
    parts = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
    known = {SHAPES[prefix], "Embedding", "Linear", "ModuleList", "SiLUActivation", *(prefix + part for part in parts)}
    rotary = module.model.rotary_emb
    return (
        all(type(child).__name__ in known and not _is_altered(child) for child in module.modules())
        and getattr(rotary, "rope_type", None) in FIXED_ROTARY
        and module.config.hidden_act == "silu"
    )


def _is_altered(child: nn.Module) -> bool:
    return bool(child._forward_hooks or child._forward_pre_hooks or "forward" in vars(child))


def agrees(module: Any) -> bool:
    """Whether this pass and the module's own say the same about three tokens of four samples, up to rounding."""
    config = module.config
    ids = torch.arange(12, device=module.lm_head.weight.device).view(4, 3) % config.vocab_size
    width = slot_width(config, 2, 1)
    slots = Slots(4, width, width, ids.device)
    direct = DirectForward(module, SlotCache(config.num_hidden_layers, slots))
    prompts = [tuple(row) for row in ids[:, :2].tolist()]
    first = direct.prefill(prompts, 2, torch.arange(4, device=ids.device), 0)
    found = torch.stack([first, direct.decode(ids[:, 2], torch.full((4,), 2, device=ids.device))], dim=1).float()
    expected = module(input_ids=ids).logits[:, 1:].float()
    tolerance = 1e-4 if direct.embedding.dtype == torch.float32 else 0.1
    return not bool(((found - expected).abs() > tolerance * expected.abs().max()).any())


@dataclass(frozen=True)
class _Linear:
    """A linear layer's weight [in, out], as the products take it, and its bias."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: Any) -> _Linear:
        return cls(layer.weight.detach().t(), None if layer.bias is None else layer.bias.detach())

    def into(self, out: Tensor, states: Tensor) -> None:
        if self.bias is None:
            torch.mm(states, self.weight, out=out)
        else:
            torch.addmm(self.bias, states, self.weight, out=out)

    def add_to(self, out: Tensor, states: Tensor) -> None:
        out.addmm_(states, self.weight)
        if self.bias is not None:
            out.add_(self.bias)


class _Norm:
    """A norm's weight, and its epsilon as a tensor."""

    def __init__(self, layer: Any) -> None:
        self.weight: Tensor = layer.weight.detach()
        self.epsilon = torch.tensor(layer.variance_epsilon, device=self.weight.device)

    def into(self, out: Tensor, states: Tensor) -> None:
        size = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        torch.addcmul(self.epsilon, size, size, value=1 / states.shape[-1], out=size).sqrt_()
        torch.div(states, size, out=out)
        out.mul_(self.weight)


class _Layer:
    """The weights of one decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self.before_attention, self.before_mlp = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.heads = [_Linear.of(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        self.head_norms = [_Norm(attention.q_norm), _Norm(attention.k_norm)] if hasattr(attention, "q_norm") else []
        self.out = _Linear.of(attention.o_proj)
        self.gate, self.up, self.down = (
            _Linear.of(part) for part in (feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj)
        )


class _Buffers:
    """Where the results of a pass over `rows` tokens go, layer after layer."""

    def __init__(self, rows: int, like: Tensor, config: Any) -> None:
        heads, groups, size = heads_of(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        wide = (-(-inner // LANES) * LANES,)
        shapes = ((hidden,), (hidden,), (heads + groups, size), (heads + groups, size), (groups, size))
        self.num_heads, self.inner = heads, inner
        self._take([like.new_empty(rows, *shape) for shape in (*shapes, (heads * size,), wide, wide)])

    def _take(self, tensors: list[Tensor]) -> None:
        self.tensors, num_heads = tensors, self.num_heads
        self.hidden, self.normed, straight, turned, self.values, self.attended, self.wide_gate, self.wide_up = tensors
        self.gate, self.up = self.wide_gate[:, : self.inner], self.wide_up[:, : self.inner]
        half = straight.shape[2] // 2
        self.straight, self.turned = _Heads(straight, num_heads, half), _Heads(turned, num_heads, half)
        self.targets = [part.flatten(1) for part in (self.straight.queries, self.straight.keys, self.values)]

    def first(self, rows: int) -> _Buffers:
        """The same memory, for fewer tokens."""
        fewer = copy(self)
        fewer._take([tensor[:rows] for tensor in self.tensors])
        return fewer

    def only(self, rows: Tensor) -> _Buffers:
        """For these tokens only, from where the attention has ended."""
        hidden, attended = self.hidden[rows], self.attended[rows]
        fewer = self.first(len(rows))
        fewer.hidden.copy_(hidden)
        fewer.attended.copy_(attended)
        return fewer


class _Heads:
    """Queries and keys side by side, and their halves, as views of one tensor [rows, heads, size]."""

    def __init__(self, both: Tensor, num_heads: int, half: int) -> None:
        self.both, self.queries, self.keys = both, both[:, :num_heads], both[:, num_heads:]
        self.left, self.right = both[..., :half], both[..., half:]


class _Step:
    """Views that every decode step over so many rows of the same slots takes."""

    def __init__(self, forward: DirectForward, rows: int) -> None:
        size, groups, width = forward.size, forward.groups, forward.slots.width
        self.rows, self.first_keys = rows, forward.cache.slot_layers[0].keys
        self.buffers = buffers = forward.buffers.first(rows)
        self.queries = buffers.attended.view(rows, forward.num_heads, size)
        self.grouped = buffers.attended.view(rows * groups, -1, size)
        self.columns = forward.first_columns[:rows] * width
        self.order = forward.slots.order[:width]
        self.scores = buffers.hidden.new_empty(*self.grouped.shape[:2], width)
        self.stored = [(layer.keys.view(-1, size), layer.values.view(-1, size)) for layer in forward.cache.slot_layers]
        self.seen = [
            (layer.keys[:rows].flatten(0, 1).transpose(1, 2), layer.values[:rows].flatten(0, 1))
            for layer in forward.cache.slot_layers
        ]


class DirectForward:
    """Reads tokens into a slot cache and says the next token's logits, as the module would."""

    def __init__(self, module: Any, cache: SlotCache) -> None:
        self.config, self.cache, self.slots = module.config, cache, cache.slots
        self.num_heads, self.groups, self.size = heads_of(self.config)
        self.embedding: Tensor = module.model.embed_tokens.weight.detach()
        self.layers = [_Layer(layer) for layer in module.model.layers]
        self.norm, self.head = _Norm(module.model.norm), _Linear.of(module.lm_head)
        self.scale = self.size**-0.5
        positions = self.slots.columns[None]
        cos, sin = (table[0] for table in module.model.rotary_emb(self.embedding, positions))
        half = self.size // 2
        self.angles = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], dim=1)], dim=1)
        """[positions, 2, head size]: the cosines, and the sines with the sign of what they multiply."""
        num_slots, device = self.slots.num_slots, self.embedding.device
        self.first_columns = torch.arange(num_slots * self.groups, device=device).view(-1, self.groups)
        self.masked, self.unmasked = (self.embedding.new_tensor(value) for value in (-torch.inf, 0.0))
        self.buffers = self.prefill_buffers = _Buffers(num_slots, self.embedding, self.config)
        self.step: _Step | None = None

    def prefill(self, prompts: Sequence[tuple[int, ...]], width: int, sources: Tensor, first: int) -> Tensor:
        """Slots from `first` on get prompts `sources`; the logits after each prompt: [prompts, vocabulary]."""
        rows, device = len(prompts), self.embedding.device
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        lasts = torch.tensor([row * width + len(prompt) - 1 for row, prompt in enumerate(prompts)], device=device)
        if len(self.prefill_buffers.hidden) < rows * width:
            self.prefill_buffers = _Buffers(rows * width, self.embedding, self.config)
        buffers, turns = self.prefill_buffers.first(rows * width), self._turns(self.angles[:width].repeat(rows, 1, 1))
        torch.index_select(self.embedding, 0, ids.flatten(), out=buffers.hidden)
        queries, keys, values, attended = (
            part.unflatten(0, (rows, width)).transpose(1, 2)
            for part in (
                *(buffers.turned.queries, buffers.turned.keys, buffers.values),
                buffers.attended.view(-1, self.num_heads, self.size),
            )
        )
        for layer, stored in zip(self.layers, self.cache.slot_layers, strict=True):
            _read(layer, buffers, turns)
            stored.put_prompts(keys, values, sources, first)
            found = scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self.scale, enable_gqa=True
            )
            attended.copy_(found)
            if layer is self.layers[-1]:
                buffers = buffers.only(lasts)
            _finish(layer, buffers)
        return self._logits(buffers)

    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Slots 0, 1, ... each read the token of this position; the logits after it: [rows, vocabulary]."""
        step = self.step
        if step is None or step.rows != len(ids) or step.first_keys is not self.cache.slot_layers[0].keys:
            self.step = step = _Step(self, len(ids))
        buffers, turns = step.buffers, self._turns(self.angles[positions])
        targets = (positions + 1)[:, None].expand(-1, self.groups)
        index = (step.columns + targets).flatten()
        mask = torch.where(step.order > targets[:, :, None], self.masked, self.unmasked).flatten(0, 1)[:, None]
        torch.index_select(self.embedding, 0, ids, out=buffers.hidden)
        for layer, stored, (keys, values) in zip(self.layers, step.stored, step.seen, strict=True):
            _read(layer, buffers, turns)
            stored[0].index_copy_(0, index, buffers.turned.keys.flatten(0, 1))
            stored[1].index_copy_(0, index, buffers.values.flatten(0, 1))
            step.queries.copy_(buffers.turned.queries)
            torch.baddbmm(mask, step.grouped, keys, alpha=self.scale, out=step.scores)
            probs = torch.softmax(step.scores, -1, torch.float32).to(values.dtype)
            torch.bmm(probs, values, out=step.grouped)
            _finish(layer, buffers)
        return self._logits(buffers)

    def _turns(self, angles: Tensor) -> _Turns:
        """From the angles of every token, [tokens, 2, head size]."""
        return angles[:, :1].expand(-1, self.num_heads + self.groups, -1).contiguous(), angles[:, 1:]

    def _logits(self, buffers: _Buffers) -> Tensor:
        self.norm.into(buffers.normed, buffers.hidden)
        logits = buffers.normed.new_empty(len(buffers.normed), self.head.weight.shape[1])
        self.head.into(logits, buffers.normed)
        return logits


def _read(layer: _Layer, buffers: _Buffers, turns: _Turns) -> None:
    """Queries, keys and values of every head; queries and keys turned by their angles."""
    layer.before_attention.into(buffers.normed, buffers.hidden)
    for target, linear in zip(buffers.targets, layer.heads, strict=True):
        linear.into(target, buffers.normed)
    straight, turned = buffers.straight, buffers.turned
    for part, norm in zip((straight.queries, straight.keys), layer.head_norms, strict=False):
        norm.into(part, part)
    half, (cosines, sines) = straight.left.shape[2], turns
    torch.mul(straight.both, cosines, out=turned.both)
    turned.left.addcmul_(straight.right, sines[..., :half])
    turned.right.addcmul_(straight.left, sines[..., half:])


def _finish(layer: _Layer, buffers: _Buffers) -> None:
    """What follows the attention: its projection, and the feed-forward."""
    layer.out.add_to(buffers.hidden, buffers.attended)
    layer.before_mlp.into(buffers.normed, buffers.hidden)
    layer.gate.into(buffers.gate, buffers.normed)
    layer.up.into(buffers.up, buffers.normed)
    silu(buffers.wide_gate, inplace=True).mul_(buffers.wide_up)
    layer.down.add_to(buffers.hidden, buffers.gate)
