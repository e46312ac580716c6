"""The column vLLM of `docs/models.md`: vLLM's CPU engine samples with a published class.

    print(try_vllm("llama", folder))        # "yes", or "rejected: ..."

Heads have at least 32 numbers, which vLLM needs on CPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

from tests.workers.models.architectures import NO_FIELDS, build_tiny, tiny_model_config
from tests.workers.models.walk import decoding_error
from trainer.cli.make_tiny import make
from verl_like.errors import ConfigError
from workers.models.state import named_state
from workers.rollout.base import EngineLimits
from workers.rollout.vllm.setup import VllmSettings

LARGEST_ERROR = 1e-4
"""Bound of the error of log-probs and greedy tokens."""
LATENT = {
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"qk_head_dim": 192, "head_dim": 64},
}
"""Sizes that vLLM's latent attention needs on CPUs."""
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32, "beta_slow": 1},
    **{"original_max_position_embeddings": 16, "mscale": 0.707, "mscale_all_dim": 0.707},
}
DEEPSEEK = LATENT | {
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": YARN},
}
LFM2 = {"block_dim": 128, "block_ff_dim": 64, "conv_dim": 128, "conv_dim_out": 128}
FIELDS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "bloom": {"n_head": 2},
    "deepseek_v2": LATENT | {"rope_parameters": YARN, "n_group": 1, "topk_group": 1},
    "falcon": {"ffn_hidden_size": 512},
    "glm4_moe": {"head_dim": 32},
    "glm4v": {
        "attention_bias": True,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "mrope_section": [4, 2, 2],
        },
    },
    "glm4_moe_lite": LATENT | {"first_k_dense_replace": 1},
    "hy_v3": {
        **{"first_k_dense_replace": 1, "expert_hidden_dim": 128, "route_norm": True},
        "qk_norm": True,
    },
    "lfm2": LFM2,
    "lfm2_vl": LFM2,
    "llama4_text": {"attention_chunk_size": 128},
    **dict.fromkeys(("axk1", "deepseek_v3", "kimi_k25"), DEEPSEEK),
}
"""Case -> fields of the text model that published ones have, and that vLLM needs."""
PARTS: dict[str, Any] = {
    "image_processor": IMAGE_PROCESSOR_MAPPING,
    "video_processor": VIDEO_PROCESSOR_MAPPING,
    "feature_extractor": FEATURE_EXTRACTOR_MAPPING,
    "audio_processor": FEATURE_EXTRACTOR_MAPPING,
}
"""Attribute of a processor -> the classes of each model."""


def try_vllm(case: str, folder: Path) -> str:
    """Return "yes" if tokens and log-probs are those of transformers, "no", or a rejection."""
    from workers.rollout.vllm.engine import VllmRolloutEngine

    module = build_tiny(tiny_model_config(case, 4, FIELDS.get(case, NO_FIELDS)))
    module.save_pretrained(folder / "model")
    if type(module.config) in PROCESSOR_MAPPING and type(module.config) in IMAGE_PROCESSOR_MAPPING:
        write_processor(module.config, folder)
    limits = EngineLimits(32, 64, max_num_seqs=4, kv_cache_gib=1.0)
    try:
        engine = VllmRolloutEngine(VllmSettings(str(folder / "model")), limits)
    except ConfigError as rejection:
        return f"rejected: {rejection}"
    engine.load_weights(named_state(module))
    engine.commit(0)
    error = decoding_error(engine, module, num_prompts=2)
    engine.close()
    return "yes" if error < LARGEST_ERROR else f"no: off by {error:.0e}"


def write_processor(config: Any, folder: Path) -> None:
    """Write `folder`/model's processor with its class's default values, which vLLM reads."""
    processor_cls: Any = PROCESSOR_MAPPING[type(config)]
    tokenizer_folder = make(folder / "tiny") / "model"
    special: dict[str, str] = {}
    for number in range(16):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, extra_special_tokens=special)
        parts = {name: _part(name, config, tokenizer) for name in processor_cls.get_attributes()}
        try:
            processor_cls(**parts).save_pretrained(folder / "model")
            return
        except AttributeError as error:  # the tokenizer has no such token
            special[error.name or str(error).split()[-1]] = f"<{number}>"


def _part(name: str, config: Any, tokenizer: Any) -> Any:
    if name not in PARTS:
        return tokenizer
    part_cls = PARTS[name][type(config)]
    while not isinstance(part_cls, type):  # one class for each backend
        classes = part_cls.values() if isinstance(part_cls, dict) else part_cls
        part_cls = next(cls for cls in classes if cls is not None)
    return part_cls()
