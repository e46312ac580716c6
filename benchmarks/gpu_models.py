"""Configurations of Qwen2.5's sizes, a tokenizer and prompts for `gpu.sh`; nothing is downloaded.

`write_configs` writes folders without weights, for runs with `model.random_init_seed`. Runs with a
critic or with several ranks read weights, which `gpu_models.py FOLDER SIZE... [--tiny]` writes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

QWEN2 = {
    "0.5b": (896, 4864, 24, 14, 2, True),
    "1.5b": (1536, 8960, 28, 12, 2, True),
    "7b": (3584, 18944, 28, 28, 4, False),
    "7b-8-layers": (3584, 18944, 8, 28, 4, False),
}
"""Hidden size, MLP size, layers, heads, key heads, whether the head is tied. Weights, gradients and
moments of the whole 7B model do not fit a GPU with 80 GB; those of eight of its layers do.
"""
TINY = (128, 256, 2, 4, 2, True)
VOCABULARY = {False: 151936, True: 512}
"""Vocabulary size, by whether the model is tiny."""
MOST_WORDS = 8192
"""Entries of the tokenizer; it cannot decode most of the tokens that a random model samples."""
NUM_PROMPTS = 256


def config_of(size: str, tiny: bool, num_layers: int = 0) -> Any:
    """Return the configuration of a Qwen2, with its own number of layers by default."""
    from transformers import Qwen2Config

    width, mlp, layers, heads, key_heads, tied = TINY if tiny else QWEN2[size]
    return Qwen2Config(
        vocab_size=VOCABULARY[tiny],
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=num_layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


def write_configs(folder: Path, tiny: bool) -> None:
    """Write the folder of every model without weights, and prompts of up to 16 and 512 tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from trainer.cli.make_tiny import CHARACTERS, SPECIAL, make_tokenizer

    num_words = min(VOCABULARY[tiny], MOST_WORDS) - len(SPECIAL) - len(CHARACTERS)
    tokenizer = make_tokenizer((*CHARACTERS, *(f" w{number}" for number in range(num_words))))
    for size in QWEN2:
        config = config_of(size, tiny)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        config.save_pretrained(folder / size)
        tokenizer.save_pretrained(folder / size)
    for longest in (16, 512):
        rows = pa.Table.from_pylist(prompts(longest))
        pq.write_table(rows, folder / f"prompts_{longest}.parquet")


def prompts(longest: int) -> list[dict[str, Any]]:
    """Return rows in verl's schema. A character is a token; the chat template adds three tokens."""
    rng = random.Random(0)
    rows = []
    for _ in range(NUM_PROMPTS):
        text = "".join(rng.choices("abcdefgh ", k=rng.randint(longest // 2, longest - 4)))
        rows.append(
            {
                "data_source": "gpu",
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"style": "rule", "ground_truth": ""},
            }
        )
    return rows


def write_weights(folder: Path, size: str, device: str) -> None:
    """Write random weights, drawn on the device, with one file per layer and one for the rest.

    Matrices are normal with transformers' standard deviation, norms are one, biases zero.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder / size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files: dict[str, dict[str, Any]] = {}
    for name, weight in model.named_parameters():
        number = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "rest"
        files.setdefault(f"model-{number}.safetensors", {})[name] = weight.shape

    index = {}
    for number, (file, shapes) in enumerate(files.items()):
        draw = torch.Generator(device).manual_seed(number)
        tensors = {}
        for name, shape in shapes.items():
            value = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            if len(shape) > 1:
                value.normal_(0, config.initializer_range, generator=draw)
            elif name.endswith("norm.weight"):
                value.fill_(1)
            tensors[name] = value.cpu()
        save_file(tensors, folder / size / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shapes, file)
    written = json.dumps({"metadata": {}, "weight_map": index})
    (folder / size / "model.safetensors.index.json").write_text(written, encoding="utf-8")


def decoded_bytes(folder: Path, rows: int, prompt: int, response: int) -> float:
    """Return the bytes that decoding in bfloat16 reads per token: all weights, and all rows' keys.

    An embedding table that is not the head is read one row at a time, so it does not count.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num_weights = sum(weight.numel() for weight in model.parameters())
    if not config.tie_word_embeddings:
        num_weights -= config.vocab_size * config.hidden_size
    key_width = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    bytes_per_token = 2 * 2 * config.num_hidden_layers * key_width
    return response * (2 * num_weights + rows * bytes_per_token * (prompt + response / 2))


def main() -> None:
    """Write models with their weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sizes", nargs="+", choices=QWEN2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args()
    for size in chosen.sizes:
        write_weights(chosen.folder, size, chosen.device)
        print(f"{chosen.folder / size}: written")


if __name__ == "__main__":
    main()
