"""A tiny Qwen2-VL, and pictures of letters, for `verl-like make-tiny --images`.

write_vision_model(Path("tiny/model"), make_tokenizer(...))
rows = make_picture_rows(Path("tiny"), 300, "train")
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
VISION_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<user>' if message.role == 'user' else '<assistant>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' "
    "if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ eos_token if message.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIDE, PATCH = 32, 8
"""Width of a picture, which becomes four tokens, and of a patch, in pixels."""


def write_vision_model(
    folder: Path, tokenizer: Any, seed: int = 0, hidden_size: int = 64, num_layers: int = 2
) -> None:
    """Write a Qwen2-VL with random weights, the tokenizer and an image processor.

    It reads pictures of 32 x 32 pixels as four tokens.

    Args:
        folder: the model folder.
        tokenizer: gets a chat template with `<user>` and `<assistant>`, and Qwen2-VL's tokens of
            images, if its vocabulary lacks them.
        seed: seed of the weights.
        hidden_size: width of the layers.
        num_layers: number of layers.
    """
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer.add_tokens(list(VISION_TOKENS), special_tokens=True)
    tokenizer.chat_template = VISION_TEMPLATE
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    num_heads = 4
    pairs = hidden_size // num_heads // 2
    height = pairs * 3 // 8
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [pairs - 2 * height, height, height],
            },
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "num_heads": 4,
            "mlp_ratio": 2,
            "hidden_size": hidden_size,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, size=sizes).save_pretrained(folder)


def make_picture_rows(
    folder: Path, num_rows: int, split: str, letters: str, seed: int = 0
) -> list[dict[str, Any]]:
    """Draw letters into `folder/pictures`; return rows in verl's schema.

    A row has a `prompt`, for GRPO, and `messages` with the answer, for SFT.
    """
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{seed}-{split}-pictures")
    rows = []
    for index in range(num_rows):
        letter = letters[index % len(letters)]
        name = f"pictures/{split}_{index}.png"
        draw_letter(letter, rng).save(folder / name)
        prompt = [{"role": "user", "content": "<image>say it"}]
        rows.append(
            {
                "data_source": "verl_like/tiny_letters",
                "prompt": prompt,
                "images": [name],
                "messages": [*prompt, {"role": "assistant", "content": letter}],
                "ability": "letters",
                "reward_model": {"style": "rule", "ground_truth": letter},
                "extra_info": {"split": split, "index": index},
            }
        )
    rng.shuffle(rows)
    return rows


def draw_letter(letter: str, rng: random.Random) -> Any:
    """Return a picture of a letter, at a random place."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (SIDE, SIDE), "white")
    place = rng.randint(4, 12), rng.randint(-4, 4)
    ImageDraw.Draw(picture).text(place, letter, fill="black", font=ImageFont.load_default(24))
    return picture
