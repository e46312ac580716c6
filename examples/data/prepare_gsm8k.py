"""Turn GSM8K into parquet files in verl's schema.

    python examples/data/prepare_gsm8k.py OUT                           # from the Hugging Face hub
    python examples/data/prepare_gsm8k.py OUT train.jsonl test.jsonl    # from GSM8K's own files

The script writes OUT/train.parquet and OUT/test.parquet. A row of GSM8K is {"question": ...,
"answer": "... #### 18"}; the number after #### becomes the ground truth, without commas. The rule
`openai/gsm8k` (`workers.rewards.functions`) scores the responses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INSTRUCTION = 'Think step by step, then write the final number after "####".'


def make_row(line: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one row in verl's schema."""
    answer = line["answer"].rpartition("####")
    if not answer[1]:
        raise ValueError("its answer has no ####")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{line['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer[2].strip().replace(",", "")},
        "extra_info": {
            "split": split,
            "index": index,
            "question": line["question"],
            "answer": line["answer"],
        },
    }


def write(lines: Iterable[Any], split: str, folder: Path, source: str) -> Path:
    """Write the parquet file of one split."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    try:
        for line in lines:
            rows.append(make_row(line, split, len(rows)))
    except (KeyError, ValueError) as err:
        why = f"it has no {err}" if isinstance(err, KeyError) else err
        raise SystemExit(f"{source}, line {len(rows) + 1} is not a line of GSM8K: {why}") from err
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{split}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), target)
    return target


def convert(source: Path, folder: Path) -> Path:
    """Write the parquet file of one JSONL file; both have the name of the split."""
    texts = source.read_text(encoding="utf-8").splitlines()
    return write(map(json.loads, texts), source.stem, folder, str(source))


def fetch(folder: Path) -> list[Path]:
    """Write the parquet files for the data set on the hub."""
    from datasets import load_dataset

    splits = load_dataset("openai/gsm8k", "main")
    return [
        write(rows, str(split), folder, f"openai/gsm8k {split}") for split, rows in splits.items()
    ]


def main() -> None:
    """Parse the command line, and run `fetch` or `convert`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="OUT", type=Path)
    parser.add_argument("files", metavar="FILE.jsonl", type=Path, nargs="*")
    args = parser.parse_args()
    targets = [convert(source, args.folder) for source in args.files] or fetch(args.folder)
    print(*(f"wrote {target}" for target in targets), sep="\n")


if __name__ == "__main__":
    main()
