"""Make the config of a tiny model that has a real model's class and all kinds of its layers.

    small = shrunk(config, with_widths=True)

The vocabulary is reduced, and, if the class allows it, widths and the number of experts. Every
limit that rows of the run exceed (window, chunk, original length of its rotary positions) is
reduced, so that rows of a few dozen tokens exceed it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from workers.models.support import LIMITS

MAX_CONTEXT = 16
"""Largest window, chunk and original context length of a small model, in tokens.

Limits that no row of the run exceeds are `POSITIONS` instead.
"""
POSITIONS = 128
"""Number of positions of a small model."""
VOCABULARY = 64
MAX_PARAMETERS = 80_000_000
"""Parameters of the largest small model, which takes a second or two to build."""

LENGTHS = (
    "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length"
).split()
SIZES = {
    64: "hidden_size n_embd d_model embedding_dim word_embed_proj_dim lru_width "
    "attention_hidden_size intermediate_size n_inner ffn_dim dim_ff ffn_hidden_size "
    "dense_intermediate_size moe_intermediate_size shared_expert_intermediate_size "
    "shared_intermediate_size intermediate_size_mlp expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size embed_dim out_hidden_size vision_output_dim "
    "projector_input_dim projector_output_dim projection_dim",
    16: "head_dim swa_head_dim dim_head kv_channels qk_nope_head_dim v_head_dim kv_lora_rank "
    "q_lora_rank linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim "
    "index_n_heads state_size ssm_state_size mamba_d_state hidden_size_per_layer_input "
    "laurel_rank",
    8: "qk_rope_head_dim rotary_dim time_step_rank mamba_dt_rank",
    4: "num_attention_heads n_head n_heads num_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads linear_num_value_heads "
    "linear_num_heads swa_num_attention_heads",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads "
    "swa_num_key_value_heads zero_expert_num n_shared_experts",
    1: "n_group topk_group n_groups mamba_n_groups mamba_ngroups num_expert_group",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
"""By config field of a width: its size in a small model."""
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth")
PERIODS = (
    "period offset interval freq step pattern first_k_dense_replace max_window_layers "
    "num_kv_shared_layers num_dense_layers every_n_layers moe_layer_start_index block_types"
).split()
"""Parts of field names that define which layers are of another kind."""
LEFT_OUT = ("dtype", "torch_dtype", "architectures", "quantization_config")
"""Fields that are left out of a small model's config."""


def shrunk(config: Any, with_widths: bool, longest: int | None = None) -> Any:
    """Return the config of the tiny model; without `with_widths`, layers keep their widths."""
    fields = copy.deepcopy(config.to_dict())
    if config.get_text_config() is not config:
        return _shrunk_parts(config, fields, with_widths, longest)
    count_name = _count_name(fields)
    if fields.get("num_layers_per_stack"):
        # hrm_text counts a layer per pass, because every pass has a separate cache
        passes = fields["num_hidden_layers"] // fields["num_layers_per_stack"]
        fields["num_layers_per_stack"] = min(fields["num_layers_per_stack"], 2)
        fields["num_hidden_layers"] = fields["num_layers_per_stack"] * passes
    elif count_name:
        _keep_first_layers(fields, count_name)

    for name, value in fields.items():
        if name in LIMITS and isinstance(value, int) and value > 0:
            fields[name] = _small_limit(value, longest)
        elif name in LENGTHS and isinstance(value, int):
            fields[name] = POSITIONS
        elif name in VOCABULARIES and isinstance(value, int):
            fields[name] = VOCABULARY
        elif name.endswith("token_id"):
            fields[name] = _small_id(value)
    if with_widths:
        _shrink_widths(fields)
        _shrink_layers(fields, config.to_dict())
    else:
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
            if isinstance(fields.get(name), int):
                fields[name] = min(fields[name], 8)

    for part in _parts(fields.get("rope_parameters")):
        _shrink_rope(part, fields, longest)
    for name in LEFT_OUT:
        fields.pop(name, None)
    return type(config).from_dict(fields)


def _shrunk_parts(
    config: Any, fields: dict[str, Any], with_widths: bool, longest: int | None
) -> Any:
    """Shrink the config of the language half, and those of the towers, which text never reaches."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            is_text = part is config.get_text_config()
            fields[name] = shrunk(part, with_widths or not is_text, longest).to_dict()
    for name, value in fields.items():
        if "token" in name and isinstance(value, int) and value >= VOCABULARY:
            fields[name] = 1  # the ids of images, which no row of a proof has
    for name in LEFT_OUT:
        fields.pop(name, None)
    return type(config).from_dict(fields)


def with_first_layers(config: Any, times: int) -> Any:
    """Return the config with `times` as many of its first layers as include every kind of layer."""
    fields, text = copy.deepcopy(config.to_dict()), config.get_text_config()
    names = (name for name in config.sub_configs if getattr(config, name, None) is text)
    part = fields if text is config else fields[next(names)]
    count_name = _count_name(part)
    if count_name:
        _keep_first_layers(part, count_name, times)
    return type(config).from_dict(fields)


def _count_name(fields: dict[str, Any]) -> str | None:
    return next((name for name in LAYER_COUNTS if isinstance(fields.get(name), int)), None)


def _keep_first_layers(fields: dict[str, Any], count_name: str, times: int = 1) -> None:
    """Keep the first layers: at least two, and enough to include every kind; or more `times`."""
    count = fields[count_name]
    lists = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == count > 1}
    kinds = [repr([value[layer] for value in lists.values()]) for layer in range(count)]
    needed = max(kinds.index(kind) + 1 for kind in kinds) if kinds else count

    for name, value in fields.items():
        if name == "max_window_layers" and "layer_types" in lists:
            continue  # the list says which layers have a window
        if any(part in name for part in PERIODS) and name not in lists:
            number = len(value) if isinstance(value, (list, str)) else value
            if isinstance(number, int) and number > 0:
                needed = max(needed, number + 1)
    if fields.get("num_kv_shared_layers"):  # this field counts from the last layer
        needed = count
    num_layers = min(count, times * max(needed, 2))
    fields[count_name] = num_layers
    for name, value in lists.items():
        fields[name] = value[:num_layers]
    per_layer = fields.get("per_layer_config")
    if isinstance(per_layer, dict):
        fields["per_layer_config"] = {k: v for k, v in per_layer.items() if int(k) < num_layers}
    if "attention_types" in fields:  # gpt_neo writes its list of layers as repetitions
        fields["attention_types"] = [[fields["attention_layers"][:num_layers], 1]]


def _small_id(value: Any) -> Any:
    if isinstance(value, list):
        return [_small_id(token) for token in value]
    return value % VOCABULARY if isinstance(value, int) else value


def _shrink_widths(fields: dict[str, Any]) -> None:
    """Set the widths of a model's configuration to those of a small model."""
    heads = next(
        (fields[n] for n in ("num_attention_heads", "n_head", "num_heads") if fields.get(n)), 0
    )
    for name in ("num_key_value_heads", "num_kv_heads"):
        if isinstance(fields.get(name), int):
            fields[name] = {heads: 4, 1: 1}.get(fields[name], 2)
    for name, size in SIZE_OF.items():
        value = fields.get(name)
        if isinstance(value, list):
            fields[name] = [size] * len(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            fields[name] = size

    if fields.get("qk_rope_head_dim"):
        for name, size in (("head_dim", 8), ("qk_head_dim", 24)):
            if fields.get(name):
                fields[name] = size
        for part in _parts(fields.get("rope_parameters")):
            if part.get("partial_rotary_factor"):
                part["partial_rotary_factor"] = 1.0  # of a head of `qk_rope_head_dim`
    # the heads of a state space model fill its inner width
    inner = int(64 * (fields.get("mamba_expand") or fields.get("expand") or 0))
    for name in ("mamba_d_head", "mamba_head_dim", "mamba_headdim"):
        if inner and isinstance(fields.get(name), int):
            fields[name] = inner // 4
    if fields.get("mamba_d_ssm"):
        fields["mamba_d_ssm"] = inner
    if fields.get("model_type") == "mamba2":
        fields["head_dim"] = inner // 4


def _shrink_layers(fields: dict[str, Any], original: Mapping[str, Any]) -> None:
    """Shrink the widths that single layers have, and keep their ratio to the model's width."""
    for widths in (fields.get("per_layer_config") or {}).values():
        for name, value in widths.items():
            if name in SIZE_OF or name == "num_key_value_heads":
                widths[name] = max(1, fields[name] * value // original[name])


def _parts(rope: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters: the common ones, and those of each kind of layer."""
    if not isinstance(rope, dict):
        return []
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _small_limit(value: int, longest: int | None) -> int:
    return min(value, MAX_CONTEXT) if longest is None or value < longest else POSITIONS


def _shrink_rope(rope: dict[str, Any], fields: dict[str, Any], longest: int | None) -> None:
    """Fit the rotary parameters to the small heads and the short context."""
    original = rope.get("original_max_position_embeddings")
    if original:
        rope["original_max_position_embeddings"] = _small_limit(original, longest)
    heads = fields.get("num_attention_heads") or 1
    width = (
        fields.get("qk_rope_head_dim")
        or fields.get("head_dim")
        or fields.get("hidden_size", 0) // heads
    )
    part = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    sections = rope.get("mrope_section")
    if sections:  # pairs of time, height and width
        pairs = int(width * part) // 2
        height = max(1, sections[1] * pairs // sum(sections))
        rope["mrope_section"] = [pairs - 2 * height, height, height]
    for name in ("long_factor", "short_factor"):
        factors, pairs = rope.get(name), int(width * part) // 2
        if factors and pairs:
            rope[name] = [factors[i * len(factors) // pairs] for i in range(pairs)]
