"""Settings of small jobs for every recipe, which name files in folders of the test."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.integration.runs import overrides, overrides_on_rows, write_jsonl
from tests.integration.test_images import overrides as overrides_on_images
from tests.integration.test_images import write_rows
from tests.workers.models.vision import write_model
from trainer.async_training.recipe import ASYNC
from trainer.config.schema import Recipe
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT

CODE = "tests.trainer.tools.rehearsal.broken"
FILE = Path(__file__).parent / "broken.py"
RECIPES: dict[str, Recipe[Any]] = {
    "ppo": PPO,
    "async": ASYNC,
    "sft": SFT,
    "dpo": DPO,
    "reward-model": REWARD_MODEL,
    "images": PPO,
    "images-sft": SFT,
}
ROW = {"prompt": "say a", "response": "ab", "chosen": "ab", "rejected": "cd"}


QWEN2_VL_7B = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
    "image_token_id": 5,
    "video_token_id": 6,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
"""The config.json that Qwen publishes, with the ids of the special tokens of the tests."""
QWEN2_VL_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    **{"min_pixels": 3136, "max_pixels": 12845056},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""The preprocessor_config.json that Qwen publishes."""


def write_qwen2_vl(folder: Path) -> Path:
    """Write the files of a published Qwen2-VL without weights, and return their folder."""
    write_model("qwen2_vl", folder / "small" / "model")
    out = with_config(folder / "small", folder / "qwen2_vl")
    (out / "config.json").write_text(json.dumps(QWEN2_VL_7B), encoding="utf-8")
    (out / "processor_config.json").unlink()
    images = out / "preprocessor_config.json"
    images.write_text(json.dumps(QWEN2_VL_IMAGES), encoding="utf-8")
    return out


def settings_on_images(name: str, folder: Path, *more: str) -> list[str]:
    """Return the settings of a job whose rows have 0, 1 and 2 images."""
    model, rows = write_qwen2_vl(folder), write_rows(folder)
    if name == "images":
        words = overrides_on_images(rows, model, folder / "run", *more)
        words = [word for word in words if not word.startswith("reward.function")]
        return [*words, "actor_rollout_ref.model.random_init_seed=1"]
    files = (f"model.path={model}", f"data.train_files={rows}", "model.random_init_seed=1")
    sizes = ("data.max_length=200", "data.train_batch_size=4")
    run = ("trainer.backend=local", f"trainer.default_local_dir={folder}/run")
    return [*files, *sizes, *run, *more]


def settings_of(name: str, tiny: Path, folder: Path, *more: str) -> list[str]:
    """Return the settings of a job of that recipe; `{...}` in `more` are folders of the test."""
    places = {"tiny": tiny, "tmp": folder, "code": CODE, "file": FILE}
    for place in places:
        more = tuple(word.replace(f"<{place}>", str(places[place])) for word in more)
    if name in ("images", "images-sft"):
        return settings_on_images(name, folder, *more)
    if name in ("ppo", "async"):
        has_kl = [] if name == "ppo" else ["algorithm.use_kl_in_reward=false"]
        words = overrides(tiny, folder / "run", "trainer.backend=local", *has_kl, *more)
        return [word for word in words if not word.startswith(NOT_ALWAYS) or word in more]
    rows = write_jsonl(folder / "rows.jsonl", [ROW] * 24)
    words = overrides_on_rows(tiny, {"train": rows, "val": rows}, folder / "run", *more)
    return [*words, "data.train_batch_size=8"]


NOT_ALWAYS = "algorithm.use_kl_in_reward=true"


def with_config(tiny: Path, out: Path, **fields: Any) -> Path:
    """Copy the tiny model with other fields of its config.json, and without weights."""
    shutil.copytree(tiny / "model", out, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    return out
