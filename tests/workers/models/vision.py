"""Folders of tiny vision-language models of published classes, with tokenizer and processor.

`save_pretrained` writes each folder. Sizes that may differ are unequal.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from workers.models.images import images_only, parts_of

TEXT = "".join(chr(code) for code in range(32, 127)) + "\n"
TEMPLATE = (
    "{%- for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}"
    "{%- for part in message.content %}{%- if part.type == 'image' %}IMAGE"
    "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}{{ '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)
SIZES = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 1024,
}


def tokenizer_with(special: dict[str, str], placeholder: str, others: tuple[str, ...] = ()) -> Any:
    """Return a tokenizer of characters and special tokens; the template writes `placeholder`."""
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokens += [*special.values(), *others]
    vocab = {token: number for number, token in enumerate([*dict.fromkeys(tokens), *TEXT])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|end|>",
        extra_special_tokens=special,
    )
    tokenizer.add_tokens(tokens[2:], special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", placeholder)
    return tokenizer


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def _processor(name: str, image_processor: Any, tokenizer: Any, **settings: Any) -> Any:
    import transformers

    cls = images_only(getattr(transformers, name))
    processor = cls(*parts_of(cls, image_processor, tokenizer), **settings)
    cls.get_attributes = classmethod(lambda cls: ["image_processor", "tokenizer"])  # are saved
    return processor


def _qwen(kind: str, processor: str) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        from transformers import AutoConfig

        special = {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        }
        tokenizer = tokenizer_with(special, "<|vision_start|><|image_pad|><|vision_end|>")
        image_processor = _class("qwen2_vl", "Qwen2VLImageProcessorPil")(
            patch_size=8,
            merge_size=2,
            size={"shortest_edge": 16 * 16, "longest_edge": 80 * 80},
        )
        common = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2}
        vision: dict[str, Any] = {
            "qwen2_vl": {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
            "qwen2_5_vl": {
                "hidden_size": 24,
                "out_hidden_size": 32,
                "intermediate_size": 40,
                "fullatt_block_indexes": [1],
                "window_size": 32,
            },
        }.get(
            kind,
            {
                "hidden_size": 24,
                "out_hidden_size": 32,
                "intermediate_size": 40,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
        )
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
        text: dict[str, Any] = SIZES | {"rope_parameters": rope}
        if kind.startswith("qwen3_5"):
            vision.pop("deepstack_visual_indexes")
            rope |= {"partial_rotary_factor": 1.0, "mrope_interleaved": True}
            text |= {
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 6,
            }
        if kind.endswith("_moe"):
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
            text |= {"shared_expert_intermediate_size": 28}
        if kind.startswith("qwen3_vl"):
            rope["mrope_interleaved"] = True
        if kind.startswith("qwen2"):
            text.pop("head_dim")
            rope["mrope_section"] = [1, 1, 2]
        config = AutoConfig.for_model(
            kind,
            text_config=text,
            vision_config=common | vision,
            image_token_id=tokenizer.image_token_id,
            video_token_id=tokenizer.video_token_id,
            vision_start_token_id=tokenizer.vision_bos_token_id,
            vision_end_token_id=tokenizer.vision_eos_token_id,
        )
        return config, _processor(processor, image_processor, tokenizer)

    return make


def _gemma3() -> tuple[Any, Any]:
    from transformers import AutoConfig

    special = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    lines = ("\n\n", "\n\n\n", "\n\n\n\n")  # vLLM looks them up
    tokenizer = tokenizer_with(special, "<start_of_image>", lines)
    image_processor = _class("gemma3", "Gemma3ImageProcessorPil")(size={"height": 32, "width": 32})
    config = AutoConfig.for_model(
        "gemma3",
        text_config=SIZES
        | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=_siglip(image_size=32, patch_size=8, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_id=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    processor = _processor("Gemma3Processor", image_processor, tokenizer, image_seq_length=4)
    return config, processor


def _siglip(**sizes: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    return shape | {"num_attention_heads": 2} | sizes


def _llava(text_type: str) -> Callable[[], tuple[Any, Any]]:
    return lambda: _llava_with(text_type)


def _llava_with(text_type: str) -> tuple[Any, Any]:
    from transformers import AutoConfig

    tokenizer = tokenizer_with({"image_token": "<image>"}, "<image>")
    image_processor = _class("llava", "LlavaImageProcessorPil")(
        size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}
    )
    config = AutoConfig.for_model(
        "llava",
        text_config=SIZES | {"model_type": text_type},
        vision_config=_siglip(image_size=24, patch_size=8)
        | {"model_type": "clip_vision_model", "projection_dim": 16},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=9,
    )
    processor = _processor(
        "LlavaProcessor",
        image_processor,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def _internvl() -> tuple[Any, Any]:
    from transformers import AutoConfig

    special = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = tokenizer_with(special, "<IMG_CONTEXT>")
    image_processor = _class("got_ocr2", "GotOcr2ImageProcessorPil")(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=3
    )
    config = AutoConfig.for_model(
        "internvl",
        text_config=SIZES | {"model_type": "qwen2"},
        vision_config=_siglip(patch_size=[8, 8], image_size=[32, 32]),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    processor = _processor("InternVLProcessor", image_processor, tokenizer, image_seq_length=4)
    return config, processor


def _idefics(kind: str, processor: str) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        from transformers import AutoConfig

        special = {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        }
        grid = tuple(f"<row_{row}_col_{col}>" for row in range(1, 4) for col in range(1, 4))
        tokenizer = tokenizer_with(special, "<image>", grid)
        name = "Idefics3ImageProcessorPil" if kind == "idefics3" else "SmolVLMImageProcessorPil"
        image_processor = _class(kind, name)(
            size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
        )
        config = AutoConfig.for_model(
            kind,
            text_config=SIZES | {"model_type": "llama"},
            vision_config=_siglip(image_size=32, patch_size=8),
            scale_factor=2,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        )
        return config, _processor(processor, image_processor, tokenizer, image_seq_len=4)

    return make


GEMMA4_SMALL = {  # as in E2B and E4B
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 160,
}
GEMMA4_LARGE = {  # as in 31B
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}


def _gemma4(text: dict[str, Any]) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        from transformers import AutoConfig

        special = {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        }
        tokenizer = tokenizer_with(special, "<|image|>", ("<|video|>",))
        image_processor = _class("gemma4", "Gemma4ImageProcessorPil")(
            patch_size=4, max_soft_tokens=70, pooling_kernel_size=3
        )
        ids = {
            name: tokenizer.convert_tokens_to_ids(token)
            for name, token in {
                "image_token_id": "<|image|>",
                "video_token_id": "<|video|>",
                "audio_token_id": "<|audio|>",
                "boi_token_id": "<|image>",
                "eoi_token_id": "<image|>",
            }.items()
        }
        config = AutoConfig.for_model(
            "gemma4",
            text_config=SIZES
            | {"sliding_window": 16, "head_dim": 32, "global_head_dim": 64}
            | text,
            vision_config=_siglip(
                patch_size=4,
                head_dim=12,
                num_key_value_heads=2,
                position_embedding_size=64,
                default_output_length=70,
            ),
            audio_config=None,
            **ids,
        )
        return config, _processor("Gemma4Processor", image_processor, tokenizer)

    return make


def _llama4() -> tuple[Any, Any]:
    from transformers import AutoConfig

    names = ("<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    special = {"image_token": "<|image|>", "patch_token": "<|patch|>"}
    tokenizer = tokenizer_with(special, "<|image|>", names)
    image_processor = _class("llama4", "Llama4ImageProcessor")(
        size={"height": 32, "width": 32}, max_patches=3
    )
    config = AutoConfig.for_model(
        "llama4",
        text_config=SIZES
        | {
            "intermediate_size_mlp": 56,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 32,
            "floor_scale": 16,
        },
        vision_config=_siglip(
            image_size=32,
            patch_size=8,
            intermediate_size=96,
            vision_output_dim=28,
            projector_input_dim=28,
            projector_output_dim=28,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<|image_start|>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<|image_end|>"),
    )
    return config, _processor("Llama4Processor", image_processor, tokenizer, patch_size=8)


def _mistral3() -> tuple[Any, Any]:
    from transformers import AutoConfig

    tokenizer = tokenizer_with({"image_token": "[IMG]"}, "[IMG]", ("[IMG_BREAK]", "[IMG_END]"))
    image_processor = _class("pixtral", "PixtralImageProcessorPil")(
        patch_size={"height": 8, "width": 8}, size={"longest_edge": 80}
    )
    config = AutoConfig.for_model(
        "mistral3",
        text_config=SIZES | {"model_type": "mistral", "sliding_window": None},
        vision_config=_siglip(image_size=80, patch_size=8, head_dim=12) | {"model_type": "pixtral"},
        spatial_merge_size=2,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    sizes = {"patch_size": 8, "spatial_merge_size": 2}
    return config, _processor("PixtralProcessor", image_processor, tokenizer, **sizes)


def _paligemma() -> tuple[Any, Any]:
    from transformers import AutoConfig

    tokenizer = tokenizer_with({"image_token": "<image>"}, "<image>")
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    image_processor = _class("siglip", "SiglipImageProcessorPil")(size={"height": 32, "width": 32})
    image_processor.image_seq_length = 16
    config = AutoConfig.for_model(
        "paligemma",
        text_config=SIZES | {"model_type": "gemma2", "vocab_size": 1300, "sliding_window": 64},
        vision_config=_siglip(image_size=32, patch_size=8, vision_use_head=False),
        projection_dim=32,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return config, _processor("PaliGemmaProcessor", image_processor, tokenizer)


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_vl": _qwen("qwen2_vl", "Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen("qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_5": _qwen("qwen3_5", "Qwen3VLProcessor"),
    "gemma3": _gemma3,
    "internvl": _internvl,
    "llava": _llava("llama"),
    "idefics3": _idefics("idefics3", "Idefics3Processor"),
    "smolvlm": _idefics("smolvlm", "SmolVLMProcessor"),
    "gemma4": _gemma4(GEMMA4_SMALL),
    "gemma4+large": _gemma4(GEMMA4_LARGE),
    "llama4": _llama4,
    "mistral3": _mistral3,
}
PROVED = FAMILIES | {
    "llava+qwen2": _llava("qwen2"),
    "paligemma": _paligemma,
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", "Qwen3VLProcessor"),
    "qwen3_5_moe": _qwen("qwen3_5_moe", "Qwen3VLProcessor"),
}
"""These families and others, on which `tools/prove_models.py` tests rows with images.

A name begins with the model type.
"""


TORCHVISION = {"gemma4", "gemma4+large", "llama4", "mistral3"}
"""Families whose processors in transformers import torchvision, which `.venv-vllm` has."""


def case(family: str, *more: Any) -> Any:
    """Return parameters of a test; those that need torchvision run with the tests of vLLM."""
    return pytest.param(family, *more, marks=[pytest.mark.vllm] if family in TORCHVISION else [])


CASES = [case(family) for family in FAMILIES]


VIDEO = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "Qwen2VLVideoProcessor"),
    **dict.fromkeys(("qwen3_vl", "qwen3_5"), "Qwen3VLVideoProcessor"),
    **dict.fromkeys(("gemma4", "gemma4+large"), "Gemma4VideoProcessor"),
    "internvl": "InternVLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
}
"""Family -> the class that reads its videos."""


def set_head_size_32(config: Any) -> None:
    """Change the language half to heads of size 32, the smallest that vLLM has on CPUs."""
    text, vision = config.get_text_config(), config.vision_config
    if config.model_type == "gemma4":  # whose heads have 32 and 64 numbers
        return
    if config.model_type == "llama4":
        text.attention_chunk_size = 128
    if config.model_type == "qwen3_5":
        text.update({"linear_key_head_dim": 128, "linear_value_head_dim": 128})
    text.update({"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1})
    if hasattr(text, "head_dim"):
        text.head_dim = 32
    if "mrope_section" in text.rope_parameters:
        text.rope_parameters["mrope_section"] = [4, 6, 6]
    if config.model_type == "qwen2_vl":
        vision.hidden_size = 64
    elif config.model_type.startswith("qwen"):
        vision.out_hidden_size = 64


def write_model(family: str, folder: Path, seed: int = 0, for_vllm: bool = False) -> Path:
    """Write a tiny model of the family's published class, and return its folder."""
    from transformers import AutoModelForImageTextToText

    config, processor = PROVED[family]()
    if for_vllm:
        set_head_size_32(config)
    config.get_text_config().pad_token_id = 0
    config.get_text_config().eos_token_id = 1
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():  # larger than the default, so that errors show
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if for_vllm and family in VIDEO:  # vLLM loads it, although it gets no videos
        settings = {"video_processor_type": VIDEO[family], "patch_size": 8, "merge_size": 2}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    if for_vllm and family.startswith("gemma4"):
        file = folder / "processor_config.json"
        sound = {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"feature_extractor": sound}))
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
