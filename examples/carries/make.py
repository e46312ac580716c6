"""Write sums with carries, such as `478+365`, and a Llama of 1.1 million random weights.

    python examples/carries/make.py FOLDER

FOLDER gets `model`, `sft.parquet` (sums with answers), `train.parquet` (sums for RL) and
`val.parquet` (1,000 sums for the test). No sum is in two of these files. Nothing is downloaded.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_like.tiny import make_model, make_tokenizer

SPLITS = {"sft": 20_000, "train": 20_000, "val": 1_000}


def make_sums() -> dict[str, list[tuple[int, int]]]:
    """Return the sums of each split; none is another one with its numbers swapped."""
    rng = random.Random(0)
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    while len(pairs) < sum(SPLITS.values()):
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        pairs.setdefault((min(a, b), max(a, b)), (a, b))
    sums = iter(pairs.values())
    return {split: [next(sums) for _ in range(count)] for split, count in SPLITS.items()}


def make_row(split: str, a: int, b: int) -> dict[str, Any]:
    """Return a sum as a chat with its answer (for SFT), or as a prompt with an answer to reward."""
    prompt, answer = {"role": "user", "content": f"{a}+{b}"}, str(a + b)
    if split == "sft":
        return {"messages": [prompt, {"role": "assistant", "content": answer}]}
    return {"prompt": [prompt], "answer": answer}


def main(folder: Path) -> None:
    """Write the model and the rows."""
    tokenizer = make_tokenizer("0123456789+")
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer, hidden_size=192, num_layers=3).save_pretrained(folder / "model")
    for split, pairs in make_sums().items():
        rows = [make_row(split, a, b) for a, b in pairs]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
