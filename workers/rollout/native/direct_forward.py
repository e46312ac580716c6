"""The forward pass of Llama-shaped models from the module's own weights, in few operations.

For `native_rollout`.

A small step through transformers' modules costs more in calls than in arithmetic. `DirectForward`
does the same sums on the same tensors (nothing is copied), on CPUs by oneDNN's products.
`is_llama_shaped` says which modules it understands; `agrees` compares the two passes on a few
tokens, once per engine. Everything else, LoRA layers and hooked or patched modules too, decodes by
`ModuleForward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from workers.cpu.onednn import is_product, product, product_silu, product_with
from workers.rollout.native.kv_cache import SlotCache, Slots, heads_of, slot_width

SHAPES = {name: f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
"""Prefix of transformers' classes -> the model: grouped attention, rotary halves, RMS norms, a
gated feed-forward.
"""
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone."""

_Turns = tuple[Tensor, Tensor]
"""For every token the cosines, once per head (products of equal shapes are several times as fast),
and the sines.
"""
LANES = 32
"""Numbers that an exponential takes at a time; the rest of a tensor, if any, is computed in another
way.
"""


def is_llama_shaped(module: Any) -> bool:
    """Whether every part of the module is one that `DirectForward` computes, with nothing hooked or
    patched in.
    """
    prefix = next(
        (prefix for prefix, name in SHAPES.items() if type(module).__name__ == name), None
    )
    if prefix is None or not type(module).__module__.startswith("transformers.models."):
        return False
    parts = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
    known = {
        SHAPES[prefix],
        "Embedding",
        "Linear",
        "ModuleList",
        "SiLUActivation",
        *(prefix + part for part in parts),
    }
    rotary = module.model.rotary_emb
    return (
        all(type(child).__name__ in known and not _is_altered(child) for child in module.modules())
        and getattr(rotary, "rope_type", None) in FIXED_ROTARY
        and module.config.hidden_act == "silu"
    )


def _is_altered(child: nn.Module) -> bool:
    return bool(child._forward_hooks or child._forward_pre_hooks or "forward" in vars(child))


def agrees(module: Any) -> bool:
    """Whether this pass and the module's own say the same about three tokens of four samples, up to
    rounding.
    """
    config = module.config
    ids = torch.arange(12, device=module.lm_head.weight.device).view(4, 3) % config.vocab_size
    width = slot_width(config, 2, 1)
    slots = Slots(4, width, width, ids.device)
    direct = DirectForward(module, SlotCache(config.num_hidden_layers, slots))
    prompts = [tuple(row) for row in ids[:, :2].tolist()]
    first = direct.prefill(prompts, 2, torch.arange(4, device=ids.device), 0)
    found = torch.stack(
        [first, direct.decode(ids[:, 2], torch.full((4,), 2, device=ids.device))], dim=1
    ).float()
    expected = module(input_ids=ids).logits[:, 1:].float()
    tolerance = 1e-4 if direct.embedding.dtype == torch.float32 else 0.1
    return not bool(((found - expected).abs() > tolerance * expected.abs().max()).any())


class _Linear:
    """A linear layer on states [rows, in]; its bits for a row do not depend on the others, from
    `MIN_ROWS` rows on.
    """

    def __init__(self, layer: Any) -> None:
        self.weight: Tensor = layer.weight.detach()
        self.bias: Tensor | None = None if layer.bias is None else layer.bias.detach()
        self.is_product = is_product(self.weight)

    def __call__(self, states: Tensor) -> Tensor:
        call = product if self.is_product else linear
        return call(states, self.weight, self.bias)

    def silu(self, states: Tensor) -> Tensor:
        """silu of the layer's result."""
        if self.is_product:
            return product_silu(states, self.weight, self.bias)
        width = len(self.weight)
        wide = states.new_zeros(len(states), -(-width // LANES) * LANES)
        wide[:, :width] = self(states)
        return silu(wide, inplace=True)[:, :width]

    def times(self, other: Tensor, states: Tensor) -> Tensor:
        """The layer's result times `other`, which may be written over."""
        if self.is_product:
            return product_with("mul", other, states, self.weight, self.bias)
        return other.mul_(self(states))

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """The layer's result plus `other`, which may be written over."""
        if self.is_product:
            return product_with("add", other, states, self.weight, self.bias)
        other.addmm_(states, self.weight.t())
        return other if self.bias is None else other.add_(self.bias)


class _Norm:
    """A norm's weight, and its epsilon as a tensor."""

    def __init__(self, layer: Any) -> None:
        self.weight: Tensor = layer.weight.detach()
        self.epsilon = torch.tensor(layer.variance_epsilon, device=self.weight.device)

    def __call__(self, states: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        torch.addcmul(self.epsilon, size, size, value=1 / states.shape[-1], out=size).sqrt_()
        return torch.div(states, size).to(states.dtype).mul_(self.weight)


class _Layer:
    """The weights of one decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self.before_attention, self.before_mlp = (
            _Norm(layer.input_layernorm),
            _Norm(layer.post_attention_layernorm),
        )
        self.heads = [
            _Linear(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        has_norms = hasattr(attention, "q_norm")
        self.head_norms = (
            [_Norm(attention.q_norm), _Norm(attention.k_norm)] if has_norms else [None, None]
        )
        self.out = _Linear(attention.o_proj)
        self.gate, self.up, self.down = (
            _Linear(part)
            for part in (feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj)
        )

    def read(self, hidden: Tensor, size: int) -> list[Tensor]:
        """Queries, keys and values, [rows, heads, head size]; queries and keys not turned yet."""
        normed = self.before_attention(hidden)
        parts = [part(normed).unflatten(1, (-1, size)) for part in self.heads]
        for index, norm in enumerate(self.head_norms):
            parts[index] = parts[index] if norm is None else norm(parts[index])
        return parts

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What follows the attention: its projection, and the feed-forward."""
        hidden = self.out.added_to(hidden, attended)
        normed = self.before_mlp(hidden)
        return self.down.added_to(hidden, self.up.times(self.gate.silu(normed), normed))


class _Step:
    """Views that every decode step over so many rows of the same slots takes."""

    def __init__(self, forward: DirectForward, rows: int) -> None:
        size, groups, width = forward.size, forward.groups, forward.slots.width
        self.rows, self.first_keys = rows, forward.cache.slot_layers[0].keys
        self.attended = forward.embedding.new_empty(rows, forward.num_heads * size)
        self.queries = self.attended.view(rows, forward.num_heads, size)
        self.grouped = self.attended.view(rows * groups, -1, size)
        self.columns = forward.first_columns[:rows] * width
        self.order = forward.slots.order[:width]
        self.scores = self.attended.new_empty(*self.grouped.shape[:2], width)
        self.stored = [
            (layer.keys.view(-1, size), layer.values.view(-1, size))
            for layer in forward.cache.slot_layers
        ]
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
        self.norm, self.head = _Norm(module.model.norm), _Linear(module.lm_head)
        self.scale = self.size**-0.5
        positions = self.slots.columns[None]
        cos, sin = (table[0] for table in module.model.rotary_emb(self.embedding, positions))
        half = self.size // 2
        self.angles = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], dim=1)], dim=1)
        """[positions, 2, head size]: the cosines, and the sines with the sign of what they
        multiply.
        """
        num_slots, device = self.slots.num_slots, self.embedding.device
        self.first_columns = torch.arange(num_slots * self.groups, device=device).view(
            -1, self.groups
        )
        self.masked, self.unmasked = (
            self.embedding.new_tensor(value) for value in (-torch.inf, 0.0)
        )
        self.step: _Step | None = None

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], width: int, sources: Tensor, first: int
    ) -> Tensor:
        """Slots from `first` on get prompts `sources`; the logits after each prompt: [prompts,
        vocabulary].
        """
        rows, device = len(prompts), self.embedding.device
        ids = torch.tensor(
            [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device
        )
        lasts = torch.tensor(
            [row * width + len(prompt) - 1 for row, prompt in enumerate(prompts)], device=device
        )
        turns = self._turns(self.angles[:width].repeat(rows, 1, 1))
        hidden = self.embedding[ids.flatten()]
        for layer, stored in zip(self.layers, self.cache.slot_layers, strict=True):
            queries, keys, values = layer.read(hidden, self.size)
            queries, keys, values = (
                part.unflatten(0, (rows, width)).transpose(1, 2)
                for part in (_turned(queries, turns), _turned(keys, turns), values)
            )
            stored.put_prompts(keys, values, sources, first)
            attended = scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self.scale, enable_gqa=True
            )
            attended = attended.transpose(1, 2).flatten(2).flatten(0, 1)
            if layer is self.layers[-1]:
                hidden, attended = hidden[lasts], attended[lasts]
            hidden = layer.finish(hidden, attended)
        return self.head(self.norm(hidden))

    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Slots 0, 1, ... each read the token of this position; the logits after it: [rows,
        vocabulary].
        """
        step = self.step
        if (
            step is None
            or step.rows != len(ids)
            or step.first_keys is not self.cache.slot_layers[0].keys
        ):
            self.step = step = _Step(self, len(ids))
        turns = self._turns(self.angles[positions])
        targets = (positions + 1)[:, None].expand(-1, self.groups)
        index = (step.columns + targets).flatten()
        mask = torch.where(step.order > targets[:, :, None], self.masked, self.unmasked).flatten(
            0, 1
        )[:, None]
        hidden = self.embedding[ids]
        for layer, stored, (seen_keys, seen_values) in zip(
            self.layers, step.stored, step.seen, strict=True
        ):
            queries, keys, values = layer.read(hidden, self.size)
            _turned(queries, turns, out=step.queries)
            stored[0].index_copy_(0, index, _turned(keys, turns).flatten(0, 1))
            stored[1].index_copy_(0, index, values.flatten(0, 1))
            torch.baddbmm(mask, step.grouped, seen_keys, alpha=self.scale, out=step.scores)
            probs = torch.softmax(step.scores, -1, torch.float32).to(seen_values.dtype)
            torch.bmm(probs, seen_values, out=step.grouped)
            hidden = layer.finish(hidden, step.attended)
        return self.head(self.norm(hidden))

    def _turns(self, angles: Tensor) -> _Turns:
        """From the angles of every token, [tokens, 2, head size]."""
        return angles[:, :1].expand(-1, self.num_heads, -1).contiguous(), angles[:, 1:]


def _turned(states: Tensor, turns: _Turns, out: Tensor | None = None) -> Tensor:
    """Queries or keys [tokens, heads, head size], turned by their angles."""
    (cosines, sines), half = turns, states.shape[2] // 2
    turned = torch.mul(states, cosines[:, : states.shape[1]], out=out)
    turned[..., :half].addcmul_(states[..., half:], sines[..., :half])
    turned[..., half:].addcmul_(states[..., :half], sines[..., half:])
    return turned
