"""Measure the start of a run on a large file of prompts or SFT rows, first without a cache.

    python benchmarks/bench_data.py [--mb 1024]

The script writes such a file and reads it twice as prompts and twice as SFT rows, each time in a
new process. It prints the seconds until the first batch, and the memory that reading added. For
comparison, it prints the seconds for reading the file's bytes and parsing its JSON, which every
start would need without a cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sides import ENV, HERE

WORDS = 40
"""Words per prompt, which make about 250 bytes per row."""


def make(folder: Path, megabytes: int) -> None:
    """Write a tiny model's tokenizer, and the given megabytes of rows in verl's schema."""
    import random

    from trainer.cli.make_tiny import make as make_tiny

    make_tiny(folder, num_train=16)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=4)) for _ in range(1000)]
    with (folder / "large.jsonl").open("w", encoding="utf-8") as file:
        number = 0
        while file.tell() < megabytes * 2**20:
            for _ in range(1000):
                rule = {"style": "rule", "ground_truth": words[number % 1000]}
                row = {"prompt": " ".join(draw.choices(words, k=WORDS)), "data_source": "large"}
                row |= {"reward_model": rule, "level": number % 7, "response": words[number % 999]}
                file.write(json.dumps(row) + "\n")
                number += 1


def read_prompts(files: str, tokenizer: Any) -> int:
    """Make the first batch; return the number of prompts."""
    from trainer.data.config import DataConfig
    from trainer.data.prompts import PromptSet

    config = DataConfig(train_files=files, max_prompt_length=256, train_batch_size=256)
    prompts = PromptSet(config, "train_files", tokenizer, needs_rules=True)
    next(prompts.in_order())
    return len(prompts)


def read_rows(files: str, tokenizer: Any) -> int:
    """Make the first batch; return the number of SFT rows."""
    from trainer.data.lm_rows import lm_batch, read_lm_rows

    rows = read_lm_rows("data.train_files", files, tokenizer, max_length=256)
    lm_batch(rows[:256], [""] * 256, tokenizer.pad_token_id)
    return len(rows)


def read(folder: Path, kind: str) -> dict[str, float]:
    """Return the seconds until the first batch of the file, and the MiB that reading added."""
    import psutil
    import pyarrow  # noqa: F401
    import torch  # noqa: F401

    from trainer.data.prompts import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "model"))
    process = psutil.Process()
    before, began = process.memory_full_info().uss, time.perf_counter()
    count = {"prompts": read_prompts, "rows": read_rows}[kind](
        str(folder / "large.jsonl"), tokenizer
    )
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "MiB of its own": (process.memory_full_info().uss - before) / 2**20,
        kind: count,
    }


def parse(folder: Path) -> dict[str, float]:
    """Parse the JSON of every line, and discard it."""
    began = time.perf_counter()
    count = 0
    with (folder / "large.jsonl").open(encoding="utf-8") as file:
        for line in file:
            json.loads(line)
            count += 1
    return {"seconds": time.perf_counter() - began, "prompts": count}


def main() -> None:
    """Parse the command line, and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--side", choices=["prompts", "rows", "parse"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        folder, side = options.folder, options.side
        print(json.dumps(parse(folder) if side == "parse" else read(folder, side)))
        return

    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch), options.mb)
        env = ENV | {"PYTHONPATH": str(HERE.parent), "XDG_CACHE_HOME": f"{scratch}/cache"}
        print(f"{options.mb} MiB of rows")
        starts = [(when, kind) for kind in ("prompts", "rows") for when in ("first start", "later")]
        for name, side in (("JSON alone", "parse"), *starts):
            command = [sys.executable, __file__, "--side", side, "--folder", scratch]
            output = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            facts = json.loads(output.stdout.splitlines()[-1])
            print(
                f"  {name:12}", ", ".join(f"{value:,.1f} {unit}" for unit, value in facts.items())
            )


if __name__ == "__main__":
    main()
