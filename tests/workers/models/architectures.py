"""A tiny configuration for every causal LM of transformers, and a module of it to compare with.

    for case in cases():
        config = tiny_model_config(case)        # raises NotBuilt with the reason
        module = build_tiny(config)             # float32, state off its defaults, deterministic

Sizes that a proof must exceed are small here: windows, chunks and original lengths are `WINDOW`
tokens, so a row of 160 tokens is longer than all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from workers.models.causal_lm import MODEL_ERRORS

WINDOW, POSITIONS, VOCAB, LAYERS, SEED = 16, 256, 128, 4, 16

SIZES = (
    (
        VOCAB,
        "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    ),
    (
        POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length "
        "max_target_positions max_source_positions model_max_length max_sequence_length",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_chunk_size window_size "
        "attention_window_size local_attention keep_window_size "
        "original_max_position_embeddings chunk_size mamba_chunk_size block_size floor_scale "
        "index_topk lsh_attn_chunk_length local_attn_chunk_length rel_extent "
        "max_inference_chunksize",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
        "num_encoder_layers num_decoder_layers max_window_layers num_blocks",
    ),
    (
        64,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff ffn_hidden_size "
        "feed_forward_size d_inner intermediate_size_mlp dense_intermediate_size "
        "shared_intermediate_size moe_shared_expert_intermediate_size ffn_dim_mult",
    ),
    (
        32,
        "hidden_size n_embd d_model embedding_size emb_dim dim embedding_dim "
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "word_embed_proj_dim attention_hidden_size lru_width router_hidden_size "
        "backbone_hidden_size input_embedding_size output_embedding_size hc_lowrank "
        "ple_embed_dim dim_model_base hidden_size_per_layer_input num_centroids",
    ),
    (
        16,
        "index_n_heads q_lora_rank kv_lora_rank o_lora_rank qk_head_dim mamba_d_state state_size "
        "ssm_state_size d_rel laurel_rank mamba_dt_rank time_step_rank adapter_rank",
    ),
    (
        8,
        "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim "
        "global_head_dim kv_channels d_head dim_head mamba_d_head mamba_head_dim "
        "mamba_headdim attention_head_size query_pre_attn_scalar attention_head_dim "
        "linear_num_value_heads mamba_n_heads mamba_num_heads centroid_intermediate_top_k",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads attention_heads num_encoder_attention_heads "
        "num_decoder_attention_heads rotary_dim num_experts n_routed_experts "
        "num_local_experts moe_num_experts zero_expert_num "
        "swa_num_attention_heads num_query_groups linear_num_heads linear_num_key_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok "
        "num_experts_per_token moe_topk moe_k type_vocab_size n_group topk_group "
        "num_expert_group mamba_n_groups n_groups mamba_ngroups first_k_dense_replace "
        "num_dense_layers sliding_window_pattern _sliding_window_pattern o_groups "
        "num_layers_per_stack attn_layer_period expert_layer_period",
    ),
)
SIZE_OF = {name: size for size, names in SIZES for name in names.split()}
"""Field of a configuration -> its size here, where the class has the field and uses it."""

WIDTHS = {name for name, size in SIZE_OF.items() if size in (8, 32) and "_heads" not in name}
WIDTHS |= {"embed_dim", "global_head_dim", "out_hidden_size"}
"""Fields that a larger model has larger: the sizes of heads and of layers."""

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blenderbot": {"encoder_layers": 4, "max_position_embeddings": 512},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), {"global_head_dim": 16}),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 8}),
    "jamba": {"attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "hidden_size": 32},
    "mistral4": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16]},
    "xlstm": {  # its caches have widths that are multiples of 64, whatever its layers have
        "hidden_size": 64,
        "embedding_dim": 64,
        "qk_dim_factor": 1.0,
        "max_inference_chunksize": 16384,
        "autocast_kernel_dtype": "float32",
    },
    "xmod": {"default_language": "en_XX"},
    **dict.fromkeys(
        ("zamba", "zamba2"),
        {
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
        },
    ),
}
"""Model type -> fields with other sizes."""

MROPE = {
    "text_config": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    }
}
TOWERS: dict[str, dict[str, dict[str, Any]]] = {
    "kosmos-2": {"text_config": {"layers": 4, "embed_dim": 32}},
    "qwen2_vl": {"vision_config": {"embed_dim": 32, "depth": 2, "hidden_size": 32}, **MROPE},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 32, "depth": 2}, **MROPE},
    "glm4v_moe": {
        "text_config": {
            "head_dim": 16,
            "rope_parameters": MROPE["text_config"]["rope_parameters"]
            | {"partial_rotary_factor": 0.5},
        }
    },
    **dict.fromkeys(
        ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker"), MROPE
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        {"vision_config": {"out_hidden_size": 32, "depth": 2}},
    ),
}
"""Model type -> section -> fields of its tower with other sizes."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2+window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "mistral+full": ("mistral", {"sliding_window": None}),
    "mixtral+window": ("mixtral", {"sliding_window": 16}),
    "phi3+longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0, 3.0, 4.0, 8.0],
                "original_max_position_embeddings": 16,
                "factor": 16.0,
            },
        },
    ),
    "llama+yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mixtral+jitter": ("mixtral", {"router_jitter_noise": 0.1}),
    "gemma4_text+heads": (  # its layers have unlike heads, as those of all published Gemma 4
        "gemma4_text",
        {
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": POSITIONS,
        },
    ),
    "phi3+partial": ("phi3", {"partial_rotary_factor": 0.5}),
}
"""Case -> its model type and fields that differ from that type's defaults."""


NO_FIELDS: Mapping[str, Any] = {}


class NotBuilt(Exception):
    """A model type whose configuration is not enough to build a causal LM; the text says why."""


def cases() -> list[str]:
    """Return every model type of transformers with a generative model, and the variants."""
    types = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return [*types, *VARIANTS]


def tiny_model_config(case: str, scale: int = 1, text: Mapping[str, Any] = NO_FIELDS) -> Any:
    """Return the configuration of a case; `scale` multiplies the sizes of heads and layers.

    The text model has the fields `text`.
    """
    model_type, fields = VARIANTS.get(case, (case, {}))
    try:
        config_cls = CONFIG_MAPPING[model_type]
        default = config_cls().to_dict()
        small = _shrunk(default, scale)
        for section, others in TOWERS.get(model_type, {}).items():
            small[section] = small.get(section, {}) | _scaled(others, scale)
        exceptions = _scaled({**EXCEPTIONS.get(model_type, {}), **fields}, scale)
        if "text_config" in small:
            small["text_config"] |= text
        else:
            exceptions |= text
        config = config_cls(**{**small, **exceptions})
    except Exception as error:
        raise NotBuilt(f"{model_type}: {type(error).__name__}: {error}") from error
    return config


def _scaled(fields: dict[str, Any], scale: int) -> dict[str, Any]:
    """Return the fields with `scale` times the sizes of heads and layers."""
    scaled: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            scaled[name] = _scaled(value, scale)
        elif name == "mrope_section":
            scaled[name] = [size * scale for size in value]
        else:
            scaled[name] = value * scale if name in WIDTHS and isinstance(value, int) else value
    return scaled


def _shrunk(default: dict[str, Any], scale: int) -> dict[str, Any]:
    """Return the fields with a size here, including those of sections."""
    small: dict[str, Any] = {}
    for name, value in default.items():
        if name == "per_layer_config":
            continue  # its class derives it from sizes such as `global_head_dim`
        if isinstance(value, dict) and (name.endswith("_config") or "model_type" in value):
            small[name] = {**_shrunk(value, scale)}
            if "model_type" in value:
                small[name]["model_type"] = value["model_type"]
        elif name == "rope_parameters" and isinstance(value, dict):
            small[name] = _short_rope(value)
            if "mrope_section" in value:  # pairs of time, height and width
                small[name]["mrope_section"] = [2 * scale, scale, scale]
        elif name == "is_decoder":
            small[name] = True
        elif name.endswith("_token_id") and isinstance(value, int):
            small[name] = min(value, 5)
        elif isinstance(value, int) and not isinstance(value, bool) and name in SIZE_OF and value:
            small[name] = min(value, SIZE_OF[name] * (scale if name in WIDTHS else 1))
    if "kv_lora_rank" in default:  # latent attention has no groups of heads
        small["num_key_value_heads"] = 4
    return small


def _short_rope(rope: dict[str, Any]) -> dict[str, Any]:
    short = {
        name: _short_rope(value) if isinstance(value, dict) else value
        for name, value in rope.items()
    }
    if "original_max_position_embeddings" in short:
        short["original_max_position_embeddings"] = WINDOW
    return short


def build_tiny(config: Any) -> Any:
    """Build the module in evaluation mode, with weights and buffers off their defaults."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        try:
            # sdpa drops the soft cap of attention scores
            capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
            has_images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            auto_class = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
            module = auto_class.from_config(
                config, dtype=torch.float32, attn_implementation="eager" if capped else None
            )
        except MODEL_ERRORS as error:
            raise NotBuilt(f"{config.model_type}: {type(error).__name__}: {error}") from error
        _move_state(module)
    return module.eval()


@torch.no_grad()
def _move_state(module: Any) -> None:
    parameters = dict(module.named_parameters())
    for name, tensor in sorted(module.state_dict(keep_vars=True).items()):
        if not tensor.is_floating_point() or name.endswith("inv_freq"):
            continue
        noise = torch.randn(tensor.shape)
        if name not in parameters and tensor.dim() < 2:
            tensor.add_(0.3 * noise)
        elif name not in parameters:  # zeros may be a mask, as in minimax's decays
            tensor.mul_(1 + 0.3 * noise)
        elif tensor.dim() >= 2 and name.endswith("weight") and "norm" not in name:
            tensor.copy_(noise / tensor[0].numel() ** 0.5)
        else:
            tensor.add_(0.1 * noise)
