"""A forward pass of Llama-shaped models in few operations, which reads the module's weights.

A small decode step through transformers' modules spends more time in Python calls than in
arithmetic. `DirectForward` computes the same sums from the same tensors, without copies.
`is_llama_shaped` says which modules it supports, and `agrees` compares it with the module on a few
tokens, once per engine. All other modules, including LoRA layers and modules with hooks, decode by
`ModuleForward`. Linear layers are computed by torch, by oneDNN (float32 on a CPU), or in int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from workers.models.attention import heads_of
from workers.models.quantize import Int8Weight, is_quantized
from workers.rollout.native.kv_cache import SlotCache, Slots, slot_width

PREFIXES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Prefixes of supported classes.

They have grouped-query attention, rotary embeddings of half rotations, RMS norms and a gated MLP.
"""
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend only on the position."""

_Rotation = tuple[Tensor, Tensor]
"""The cosines and the sines of the rotary angles of every token.

The cosines are repeated for all heads, because products of equal shapes are several times as fast.
"""


def is_llama_shaped(module: Any) -> bool:
    """True if `DirectForward` supports every part of the module, and none has a hook or patch."""
    name = type(module).__name__
    prefix = name.removesuffix("ForCausalLM")
    if prefix == name or prefix not in PREFIXES:
        return False
    if not type(module).__module__.startswith("transformers.models."):
        return False

    parts = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")
    known = {"Embedding", "Linear", "ModuleList", "SiLUActivation", f"{prefix}RotaryEmbedding"}
    known |= {prefix + part for part in parts}
    for child in module.modules():
        is_altered = child._forward_hooks or child._forward_pre_hooks or "forward" in vars(child)
        if type(child).__name__ not in known or is_altered:
            return False

    rope_type = getattr(module.model.rotary_emb, "rope_type", None)
    return rope_type in FIXED_ROTARY and module.config.hidden_act == "silu"


def agrees(module: Any) -> bool:
    """True if `DirectForward` gives the logits of the module, up to rounding, on a few tokens."""
    config = module.config
    ids = torch.arange(12, device=module.lm_head.weight.device).view(4, 3) % config.vocab_size
    prompts = [tuple(row) for row in ids[:, :2].tolist()]

    width = slot_width(config, 2, 1)
    slots = Slots(4, width, width, ids.device)
    direct = DirectForward(module, SlotCache(config.num_hidden_layers, slots))
    first = direct.prefill(prompts, 2, torch.arange(4, device=ids.device), 0)
    second = direct.decode(ids[:, 2], torch.full((4,), 2, device=ids.device))
    direct_logits = torch.stack([first, second], dim=1).float()

    expected = module(input_ids=ids).logits[:, 1:].float()
    is_rounded = direct.embedding.dtype != torch.float32 or is_quantized(module)
    tolerance = 0.1 if is_rounded else 1e-3
    is_off = (direct_logits - expected).abs() > tolerance * expected.abs().max()
    return not bool(is_off.any())


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

    def __init__(self, layer: Any, by_onednn: bool) -> None:
        build = partial(build_linear, by_onednn=by_onednn)
        attention, mlp = layer.self_attn, layer.mlp
        self.before_attention = _Norm(layer.input_layernorm)
        self.before_mlp = _Norm(layer.post_attention_layernorm)

        self.qkv = [build(attention.q_proj), build(attention.k_proj), build(attention.v_proj)]
        self.qk_norms: list[_Norm] = []
        if hasattr(attention, "q_norm"):
            self.qk_norms = [_Norm(attention.q_norm), _Norm(attention.k_norm)]
        self.out = build(attention.o_proj)
        self.gate, self.up = build(mlp.gate_proj), build(mlp.up_proj)
        self.down = build(mlp.down_proj)

    def project(self, hidden: Tensor, size: int) -> list[Tensor]:
        """Return queries, keys and values before rotation, each [rows, heads, head size]."""
        normed = self.before_attention(hidden)
        parts = [linear(normed).unflatten(1, (-1, size)) for linear in self.qkv]
        for index, norm in enumerate(self.qk_norms):
            parts[index] = norm(parts[index])
        return parts

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Compute the rest of the layer after attention: the output projection and the MLP."""
        hidden = self.out.added_to(hidden, attended)
        normed = self.before_mlp(hidden)
        return self.down.added_to(hidden, self.up.times(self.gate.silu(normed), normed))


class _Step:
    """Buffers and views that all decode steps over the same slots and number of rows share."""

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
    """Reads tokens into a slot cache and returns the logits of the next token, like the module."""

    def __init__(self, module: Any, cache: SlotCache) -> None:
        self.config, self.cache, self.slots = module.config, cache, cache.slots
        self.num_heads, self.groups, self.size = heads_of(self.config)
        self.scale = self.size**-0.5

        self.embedding: Tensor = module.model.embed_tokens.weight.detach()
        by_onednn = uses_onednn(module)
        self.layers = [_Layer(layer, by_onednn) for layer in module.model.layers]
        self.norm, self.head = _Norm(module.model.norm), build_linear(module.lm_head, by_onednn)

        positions = self.slots.columns[None]
        cos, sin = (table[0] for table in module.model.rotary_emb(self.embedding, positions))
        half = self.size // 2
        self.angles = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], dim=1)], dim=1)
        """[positions, 2, head size]: the cosines, and the signed sines."""

        num_keys = self.slots.num_slots * self.groups
        first_columns = torch.arange(num_keys, device=self.embedding.device)
        self.first_columns = first_columns.view(-1, self.groups)
        self.masked = self.embedding.new_tensor(-torch.inf)
        self.unmasked = self.embedding.new_tensor(0.0)
        self.step: _Step | None = None

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], width: int, sources: Tensor, first: int
    ) -> Tensor:
        """Read prompts into consecutive slots; return the logits after each prompt.

        Slot `first + i` gets prompt `sources[i]`, padded to `width`. The logits are
        [prompts, vocabulary].
        """
        rows, device = len(prompts), self.embedding.device
        padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        lasts = [row * width + len(prompt) - 1 for row, prompt in enumerate(prompts)]
        lasts += lasts[:1] * (MIN_ROWS_OF_MKL - rows)  # linear layers need this many rows
        ids = torch.tensor(padded, device=device)
        last_tokens = torch.tensor(lasts, device=device)

        rotation = self._rotation(self.angles[:width].repeat(rows, 1, 1))
        hidden = self.embedding[ids.flatten()]
        num_columns = min(width, self.slots.width - 1)  # further columns are padding
        for layer, stored in zip(self.layers, self.cache.slot_layers, strict=True):
            queries, keys, values = layer.project(hidden, self.size)
            queries, keys, values = (
                part.unflatten(0, (rows, width)).transpose(1, 2)
                for part in (_rotated(queries, rotation), _rotated(keys, rotation), values)
            )
            stored.fill(first, keys, values, sources, num_columns)

            attended = scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self.scale, enable_gqa=True
            )
            attended = attended.transpose(1, 2).flatten(2).flatten(0, 1)
            if layer is self.layers[-1]:  # only the last tokens of the prompts are read from it
                hidden, attended = hidden[last_tokens], attended[last_tokens]
            hidden = layer.finish(hidden, attended)
        return self.head(self.norm(hidden))[:rows]

    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Read one token into each of the slots 0, 1, ...; return the logits after it.

        The logits are [rows, vocabulary].
        """
        step, first_keys = self.step, self.cache.slot_layers[0].keys
        if step is None or step.rows != len(ids) or step.first_keys is not first_keys:
            self.step = step = _Step(self, len(ids))
        rotation = self._rotation(self.angles[positions])
        targets = (positions + 1)[:, None].expand(-1, self.groups)
        index = (step.columns + targets).flatten()
        is_hidden = step.order > targets[:, :, None]
        mask = torch.where(is_hidden, self.masked, self.unmasked).flatten(0, 1)[:, None]

        hidden = self.embedding[ids]
        for layer, (stored_keys, stored_values), (seen_keys, seen_values) in zip(
            self.layers, step.stored, step.seen, strict=True
        ):
            queries, keys, values = layer.project(hidden, self.size)
            _rotated(queries, rotation, out=step.queries)
            stored_keys.index_copy_(0, index, _rotated(keys, rotation).flatten(0, 1))
            stored_values.index_copy_(0, index, values.flatten(0, 1))

            torch.baddbmm(mask, step.grouped, seen_keys, alpha=self.scale, out=step.scores)
            probs = torch.softmax(step.scores, -1, torch.float32).to(seen_values.dtype)
            torch.bmm(probs, seen_values, out=step.grouped)
            hidden = layer.finish(hidden, step.attended)
        return self.head(self.norm(hidden))

    def _rotation(self, angles: Tensor) -> _Rotation:
        """Return the rotation of tokens with these angles, [tokens, 2, head size]."""
        return angles[:, :1].expand(-1, self.num_heads, -1).contiguous(), angles[:, 1:]


def _rotated(states: Tensor, rotation: _Rotation, out: Tensor | None = None) -> Tensor:
    """Return queries or keys [tokens, heads, head size] after rotation."""
    cosines, sines = rotation
    half = states.shape[2] // 2
    rotated = torch.mul(states, cosines[:, : states.shape[1]], out=out)
    rotated[..., :half].addcmul_(states[..., half:], sines[..., :half])
    rotated[..., half:].addcmul_(states[..., :half], sines[..., half:])
    return rotated


MIN_ROWS = 4
"""Minimum rows of a pass; with fewer, the bits of a linear layer's result depend on the number."""
MIN_ROWS_OF_MKL = 16
"""Minimum rows if torch computes in float32 on a CPU: MKL has special kernels for few rows."""
NARROW = 256
"""Models with a smaller hidden size use MKL instead of oneDNN.

A call of MKL takes 3 µs, and a call of oneDNN 13 µs, which is more than such a product takes.
"""
SIMD_WIDTH = 32
"""Numbers for which exponentials are computed at a time; the remainder is computed differently."""
SERIAL_NUMBERS = 32768
"""Numbers up to which torch computes in one thread. Several would each have a remainder."""


class TorchLinear:
    """A linear layer on states [rows, in], with operations that decoder layers apply to its result.

    In float32 on a CPU, with `MIN_ROWS_OF_MKL` or more rows, the bits of a row's result do not
    depend on other rows.
    """

    def __init__(self, layer: Any) -> None:
        self.weight: Tensor = layer.weight.detach()
        self.bias: Tensor | None = None if layer.bias is None else layer.bias.detach()

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)

    def silu(self, states: Tensor) -> Tensor:
        """Return the SiLU of the layer's result."""
        # Whole vectors, so that all numbers of a row are computed in the same way.
        width = len(self.weight)
        padded = states.new_zeros(len(states), -(-width // SIMD_WIDTH) * SIMD_WIDTH)
        padded[:, :width] = self(states)
        numbers = padded.view(-1)
        for part in numbers.split(SERIAL_NUMBERS) if numbers.is_cpu else [numbers]:
            silu(part, inplace=True)
        return padded[:, :width]

    def times(self, other: Tensor, states: Tensor) -> Tensor:
        """Return the layer's result times `other`, which may be overwritten."""
        return other.mul_(self(states))

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """Return the layer's result plus `other`, which may be overwritten."""
        other.addmm_(states, self.weight.t())
        return other if self.bias is None else other.add_(self.bias)


class OnednnLinear(TorchLinear):
    """A linear layer computed by oneDNN, each method in one pass over memory.

    With `MIN_ROWS` or more rows, the bits of a row's result do not depend on other rows.
    """

    def __init__(self, layer: Any) -> None:
        from workers.cpu import onednn

        super().__init__(layer)
        self.onednn = onednn

    def __call__(self, states: Tensor) -> Tensor:
        return self.onednn.linear(states, self.weight, self.bias)

    def silu(self, states: Tensor) -> Tensor:
        """Return the SiLU of the layer's result."""
        return self.onednn.linear_silu(states, self.weight, self.bias)

    def times(self, other: Tensor, states: Tensor) -> Tensor:
        """Return the layer's result times `other`."""
        return self.onednn.linear_binary("mul", other, states, self.weight, self.bias)

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """Return the layer's result plus `other`."""
        return self.onednn.linear_binary("add", other, states, self.weight, self.bias)


class Int8Linear(TorchLinear):
    """A linear layer with an int8 weight.

    `added_to` does not use torch's `addmm_`, which would multiply by the dequantized weight.
    """

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """Return the layer's result plus `other`, which may be overwritten."""
        return other.add_(self(states))


def build_linear(layer: Any, by_onednn: bool) -> TorchLinear:
    """Wrap this layer; `by_onednn` is the result of `uses_onednn`."""
    if isinstance(layer.weight, Int8Weight):
        return Int8Linear(layer)
    return OnednnLinear(layer) if by_onednn else TorchLinear(layer)


def uses_onednn(module: Any) -> bool:
    """Return True if the direct pass uses oneDNN: in float32 on a CPU, except for narrow models."""
    weight = module.lm_head.weight
    if weight.device.type != "cpu" or module.config.hidden_size < NARROW:
        return False  # before workers.cpu is imported, which only a CPU needs
    from workers.cpu import onednn

    return onednn.supports(weight)


def fewest_rows(weight: Tensor, by_onednn: bool) -> int:
    """Return the minimum rows of a pass through layers whose weights are like `weight`."""
    by_mkl = weight.device.type == "cpu" and weight.dtype == torch.float32 and not by_onednn
    return MIN_ROWS_OF_MKL if by_mkl else MIN_ROWS
