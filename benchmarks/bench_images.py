"""Compare the images per second of the data path with TRL, from files to the model's inputs.

    python benchmarks/bench_images.py --trl-python PATH [--images 32] [--rounds 3]

PATH is the Python of an environment with TRL 1.16 and the same transformers. Both sides read the
same rows, each with a JPEG of about one megapixel, all of unlike sizes. The image processor is that
of Qwen2-VL with its default settings, on PIL. For `sft`, TRL runs its collator. For `grpo` with 8
samples per prompt, TRL runs `_tokenize_prompts`, and then the processor again for the loss, as its
`_generate_and_score_completions` does. Our side also checks every file. Imports and models are
loaded before. Prints medians over alternated rounds; exits with 1 if one is below 1.5. Run it on an
idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sides import ask

BATCH, N, TIMES_TRL = 4, 8, 1.5


def make(folder: Path, count: int) -> None:
    """Write a tiny Qwen2-VL with the image processor of the published models, images and rows."""
    import numpy as np
    from PIL import Image
    from transformers import Qwen2VLImageProcessorPil

    from tests.workers.models.vision import write_model

    settings = write_model("qwen2_vl", folder / "model") / "processor_config.json"
    published = {"image_processor": Qwen2VLImageProcessorPil().to_dict()}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | published))
    draw, rows = np.random.default_rng(0), []
    for number in range(count):
        colors = Image.fromarray(draw.integers(0, 255, (128, 128, 3), dtype=np.uint8))
        path = folder / f"{number}.jpg"
        colors.resize(draw.integers(900, 1100, 2).tolist()).save(path, quality=92)
        chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
        rows.append({"prompt": chat[:1], "messages": chat, "images": [str(path)]})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def ours(folder: Path, kind: str) -> Iterator[int]:
    """Yield when everything is loaded, and then the number of pixel values of all passes."""
    import torch
    from transformers import AutoModelForImageTextToText

    from trainer.data.config import DataConfig
    from trainer.data.lm_rows import lm_batch, read_lm_rows
    from trainer.data.prompts import PromptSet, load_tokenizer
    from workers.models.images import ImageInput, image_reader

    model, files, num_values = str(folder / "model"), str(folder / "rows.jsonl"), 0
    tokenizer = load_tokenizer(model)
    images = ImageInput(AutoModelForImageTextToText.from_pretrained(model), image_reader(model))
    yield 0
    if kind == "sft":
        rows = read_lm_rows("data.train_files", files, tokenizer, max_length=4096)
        chunks = (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))
        batches = (lm_batch(chunk, [""] * len(chunk), 0) for chunk in chunks)
    else:
        config = DataConfig(train_files=files, train_batch_size=BATCH, max_prompt_length=4096)
        prompts = PromptSet(config, "train_files", tokenizer, needs_rules=False)
        batches = (batch.repeat(N) for batch in prompts.in_order())
    for batch in batches:
        refs, names = list(batch.non_tensor_batch["images"]), ["a row"] * len(batch)
        numbers = images.of_rows(batch.columns, refs, names)
        for row, of_row in zip(batch.column("input_ids").rows(), numbers.rows(), strict=True):
            inputs = images.arguments({"input_ids": row}, of_row, torch.device("cpu"))
            num_values += inputs["pixel_values"].numel()
    yield num_values


def trl(folder: Path, kind: str) -> Iterator[int]:
    """Yield the same for TRL."""
    from datasets import Dataset, Image, List
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen2VLProcessor
    from trl import GRPOTrainer
    from trl.data_utils import apply_chat_template, prepare_multimodal_messages
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    parts = {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])}
    cls: Any = type("Qwen2VLProcessor", (Qwen2VLProcessor,), parts)  # videos need torchvision
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder / "model")
    processor = cls(image_processor, tokenizer, chat_template=tokenizer.chat_template)
    trainer: Any = SimpleNamespace(_is_vlm=True, environment_factories=None, tools=None)
    vars(trainer).update(processing_class=processor, chat_template=None, chat_template_kwargs={})
    collate, num_values = DataCollatorForVisionLanguageModeling(processor), 0
    yield 0
    rows = map(json.loads, (folder / "rows.jsonl").read_text().splitlines())
    data = Dataset.from_list(list(rows)).cast_column("images", List(Image()))
    data = data.select_columns(["messages" if kind == "sft" else "prompt", "images"])
    for start in range(0, len(data), BATCH):
        numbers = range(start, min(start + BATCH, len(data)))
        if kind == "sft":
            num_values += collate(data.__getitems__(list(numbers)))["pixel_values"].numel()
            continue
        samples = data.__getitems__([number for number in numbers for _ in range(N)])
        images = [sample["images"] for sample in samples]
        prompts = [prepare_multimodal_messages(s["prompt"], s["images"]) for s in samples]
        GRPOTrainer._tokenize_prompts(trainer, prompts)
        texts = [apply_chat_template({"prompt": p}, processor)["prompt"] for p in prompts]
        inputs = processor(images=images, text=texts, padding=True, return_tensors="pt")
        num_values += inputs["pixel_values"].numel()
    yield num_values


def main() -> None:
    """Run both sides alternately, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, kind, folder = options.side
        steps = {"ours": ours, "trl": trl}[side](Path(folder), kind)
        next(steps)
        began, cpu_began = time.perf_counter(), time.process_time()
        answer = {"values": next(steps), "wall": time.perf_counter() - began}
        print(json.dumps(answer | {"cpu": time.process_time() - cpu_began}))
        return
    times = []
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), options.images)
        for kind in ("sft", "grpo"):
            rounds = []
            for _ in range(options.rounds):
                us, them = (
                    ask(python, __file__, "--side", side, kind, folder)
                    for side, python in (("ours", sys.executable), ("trl", options.trl_python))
                )
                assert us["values"] == them["values"], "both sides have the same pixels"
                rounds.append([them[key] / us[key] for key in ("wall", "cpu")])
            wall, cpu = map(statistics.median, zip(*rounds, strict=True))
            story = f"{kind}: {wall:.2f} times TRL's images per second, {cpu:.2f} per CPU second"
            print(story, flush=True)
            times.append(wall)
    sys.exit(min(times) < TIMES_TRL)


if __name__ == "__main__":
    main()
