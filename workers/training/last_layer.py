"""The last layer, computed only at the tokens whose output is read.

    if only_reads_needed(module):           # once, after the module has its weights
        compute_reads_only(module)
        numbers = read_few(module, feed)    # what `packing.read` gives, with less work

A row's score is read at its last token. Of the last layer the other tokens are needed as keys and
values alone: its attention's output, its MLP and the final norm are computed where something reads
them. That is a fifth of a model of four layers, and exact: no number that is left out reaches the
loss. Layers that are not built as Llama's are run whole; a class is compared once with the formula.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from workers.models.causal_lm import body_of
from workers.models.stand_in import MODEL_ERRORS, ConfigByContent, stand_in
from workers.training.attention import packed_rows, takes_layout
from workers.training.packing import Feed, model_inputs
from workers.training.row_proof import LARGEST_ERROR, RowPasses, probe_rows

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
"""The modules of a layer, in their order."""


def only_reads_needed(module: Any) -> bool:
    """Whether the last layer of a module that runs packed rows may leave tokens out."""
    return takes_layout(module) and _is_proven(ConfigByContent.of(module.config))


def compute_reads_only(module: Any) -> None:
    """Have the last layer leave out what nothing reads, in the passes of `read_few`."""
    layer = body_of(module).layers[-1]
    layer.forward = MethodType(_layer_forward, layer)


def read_few(module: Any, feed: Feed) -> Tensor:
    """The head's output where it is read, of a packed feed: [positions, size]."""
    numbers: Tensor = module(**model_inputs(module, feed), read_at=feed.reads)[0]
    return numbers


def _layer_forward(
    layer: Any, hidden_states: Tensor, *args: Any, read_at: Tensor | None = None, **inputs: Any
) -> Any:
    """[1, tokens, size] -> [1, positions, size]; whole in a pass that names no positions."""
    if read_at is None:
        return type(layer).forward(layer, hidden_states, *args, **inputs)

    def picked(_: nn.Module, states: tuple[Tensor]) -> Tensor:
        return states[0].index_select(1, read_at)

    handle = layer.self_attn.o_proj.register_forward_pre_hook(picked)
    try:
        normed = layer.input_layernorm(hidden_states)
        attended = layer.self_attn(hidden_states=normed, **inputs)[0]
    finally:
        handle.remove()

    states = hidden_states.index_select(1, read_at) + attended
    return states + layer.mlp(layer.post_attention_layernorm(states))


@functools.lru_cache(maxsize=64)
def _is_proven(key: ConfigByContent) -> bool:
    """Whether a small model of this config gives the same numbers with less computed."""
    try:
        body = body_of(stand_in(key.config, "sdpa"))
        if any(not hasattr(body.layers[-1], part) for part in PARTS):
            return False
        columns, reads = probe_rows()
        feed = RowPasses("packed").feed(columns, reads, torch.device("cpu"))
        with torch.no_grad(), packed_rows(body):
            inputs = model_inputs(body, feed)
            expected = body(**inputs).last_hidden_state[0, feed.reads]
            compute_reads_only(body)
            found = body(**inputs, read_at=feed.reads).last_hidden_state[0]
    except MODEL_ERRORS:
        return False
    same_shape = found.shape == expected.shape
    return same_shape and float((found - expected).norm() / expected.norm()) <= LARGEST_ERROR
