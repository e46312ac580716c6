"""Rows with images add at most 1.5 times the size of their files to the driver's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.workers.models.vision import write_model

NUM_IMAGES, N = 128, 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "paths": {},
    "row groups": {"row_group_size": 16},
    "pages": {"use_dictionary": False, "write_batch_size": 8},
    "one page": {"use_dictionary": False},
}
PROGRAM = f"""
import gc, json, sys, threading, time
from pathlib import Path
from trainer.data.config import DataConfig
from trainer.data.prompts import PromptSet, load_tokenizer

folder = Path(sys.argv[1])
tokenizer = load_tokenizer(str(folder / "model"))

def read(name):
    config = DataConfig(train_files=str(folder / name), max_prompt_length=256)
    prompts = PromptSet(config, "train_files", tokenizer, needs_rules=False)
    return prompts, prompts.batch(prompts.rows.tolist(), epoch=0).repeat({N})

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def watch():
    while True:
        sizes.append(resident())
        time.sleep(0.002)

sizes = []
threading.Thread(target=watch, daemon=True).start()
for name in sys.argv[2:]:
    read(f"few {{name}}")  # loads all libraries
    gc.collect()
    before = resident()
    sizes.clear()
    prompts, batch = read(name)
    print(json.dumps([len(batch), max(sizes) - before, resident() - before]))
    del prompts, batch
"""


@pytest.mark.long
def test_images_add_at_most_half_more_memory_to_the_driver_than_their_files_have(
    tmp_path: Path,
) -> None:
    write_model("qwen2_vl", tmp_path / "model")
    draw = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.jpg" for number in range(NUM_IMAGES)]
    for path in paths:
        colors = Image.fromarray(draw.integers(0, 255, (128, 128, 3), dtype=np.uint8))
        colors.resize((1024, 1024)).save(path, quality=92)
    for name, layout in LAYOUTS.items():
        images = [str(path) if name == "paths" else {"bytes": path.read_bytes()} for path in paths]
        chat = [{"role": "user", "content": "<image>What?"}]
        table = pa.Table.from_pylist([{"prompt": chat, "images": [image]} for image in images])
        pq.write_table(table, tmp_path / f"{name}.parquet", **layout)
        pq.write_table(table.slice(0, 2), tmp_path / f"few {name}.parquet", **layout)

    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *(f"{n}.parquet" for n in LAYOUTS)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    compressed = sum(path.stat().st_size for path in paths)
    assert compressed > 40e6
    for name, line in zip(LAYOUTS, output.stdout.splitlines(), strict=True):
        num_samples, peak, rest = json.loads(line)
        assert num_samples == NUM_IMAGES * N
        if name != "one page":  # pyarrow decompresses a whole page
            assert peak <= 1.5 * compressed, name
        assert rest <= 0.5 * compressed, name
