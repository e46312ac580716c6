"""How models of a class may run, from the table `support.json`.

    support = Support.of(module.config)
    reason = support.why_not("packed")          # "" means that it is correct

Model classes differ in masks, caches and heads. `tools/prove_models.py` tests each way on a small
model of each class with random weights, and writes the table:

    packed padded   rows concatenated, or padded to one length; shared: packed with shared prefixes
    split stages    packed rows split over ranks, and layers in stages
    head            the head in chunks of positions
    native cached   decoding by the native engine, and by transformers with and without a cache
    generate
    replay int8     replayed choices of experts, and linear weights as int8
    images          rows with images, in each layout that a run may choose

A way after which `<` and names of limits follow, such as `native<sliding_window`, is correct for
rows within these limits. A way with `@eager` or `@sdpa` is correct with this attention only.

A class with a feature that no tested configuration had, such as another kind of layer, is not
listed. It runs on padded rows with the whole head.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.models.classes import model_class

TABLE = Path(__file__).with_suffix(".json")
"""File with a row "class feature ..." -> "way ..." per tested configuration."""
ORIGINAL = "original_max_position_embeddings"
LIMITS = (
    "sliding_window sliding_window_size window_size attention_window_size local_attention "
    "attention_chunk_size chunk_size mamba_chunk_size block_size keep_window_size index_topk "
    f"{ORIGINAL} floor_scale"
).split()
"""Fields with a number of tokens beyond which a model computes in another way."""
KINDS = ("layer_types", "layers_block_type", "block_types", "attention_layers")
"""Lists with a kind per layer."""
FLAGS = ("alibi", "is_causal", "is_decoder", "use_bidirectional_attention")
"""Fields that change how the layers of a class read other tokens."""
LONGROPE = "longrope"
"""The kind of rotary positions whose factors depend on the length of a row."""
Capabilities = Mapping[str, frozenset[str]]
"""Correct way -> the limits within which it is correct."""


@dataclass(frozen=True)
class Support:
    """The correct ways to run models with one config."""

    model_type: str
    """The model type, for messages."""
    config: Any
    attention: str
    """The attention that the model is built with: eager or sdpa."""
    capabilities: Capabilities | None
    """None if the class is not listed."""

    @classmethod
    def of(cls, config: Any, built_with: str = "") -> Support:
        """Return the support for a config, with this attention or by default the config's own."""
        is_eager = (built_with or config.get_text_config()._attn_implementation) == "eager"
        ways = capabilities_of(model_class(config).__name__, features(config))
        return cls(config.model_type, config, "eager" if is_eager else "sdpa", ways)

    @property
    def name(self) -> str:
        """The class and its features, as in the table."""
        return " ".join([model_class(self.config).__name__, *sorted(features(self.config))])

    def why_not(self, way: str, longest: int = 0) -> str:
        """Return why a way is not known to be correct for rows of up to `longest` tokens, or ""."""
        name = self.name
        if self.capabilities is None:
            return f"{name} is not in the table of tested classes"
        within = self.capabilities.get(f"{way}@{self.attention}", self.capabilities.get(way))
        if within is None:
            return f"in a test of {name}, it was wrong"
        for limit, value in window_sizes(self.config):
            if limit in within and value < longest:
                return (
                    f"it is correct only within {limit}={value}, and this run's rows have up to "
                    f"{longest} tokens"
                )
        return ""


def capabilities_of(class_name: str, having: frozenset[str]) -> Capabilities | None:
    """Return what is correct in the tested configuration with these features.

    If there is none, return what is correct in all tested configurations with these and more.
    """
    tested = _table().get(class_name, [])
    rows = [ways for features, ways in tested if features == having]
    rows = rows or [ways for features, ways in tested if having < features]
    if not rows:
        return None
    common = set.intersection(*(set(ways) for ways in rows))
    return {way: frozenset().union(*(ways[way] for ways in rows)) for way in common}


@functools.cache
def _table() -> dict[str, list[tuple[frozenset[str], Capabilities]]]:
    table: dict[str, list[tuple[frozenset[str], Capabilities]]] = {}
    for key, words in json.loads(TABLE.read_text(encoding="utf-8")).items():
        class_name, *names = key.split()
        ways = {}
        for word in words.split():
            way, _, limits = word.partition("<")
            ways[way] = frozenset(filter(None, limits.split(",")))
        table.setdefault(class_name, []).append((frozenset(names), ways))
    return table


def features(config: Any) -> frozenset[str]:
    """Return the kinds of layers, flags and rotary positions of a config."""
    text = config.get_text_config()
    fields = text.to_dict()
    names = {f"{flag}={fields[flag]}" for flag in FLAGS if isinstance(fields.get(flag), bool)}
    for name, value in fields.items():
        if isinstance(value, list) and name in KINDS:
            names.update(kind for kind in value if isinstance(kind, str))
    if any(part.get("rope_type") == LONGROPE for part in ropes(text)):
        names.add(LONGROPE)
    return frozenset(names)


def window_sizes(config: Any) -> list[tuple[str, int]]:
    """Return the limits of a config that are set."""
    text = config.get_text_config()
    fields = text.to_dict()
    limits = [(name, fields.get(name)) for name in LIMITS]
    limits += [(ORIGINAL, part.get(ORIGINAL)) for part in ropes(text)]
    return [(name, value) for name, value in limits if isinstance(value, int)]


def ropes(text: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters: the common ones, and those of each kind of layer."""
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]
