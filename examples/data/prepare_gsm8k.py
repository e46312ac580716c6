"""Turn GSM8K's own JSONL files into parquet files in verl's schema.

    python examples/data/prepare_gsm8k.py OUT train.jsonl test.jsonl

writes OUT/train.parquet and OUT/test.parquet. A line of GSM8K is {"question": ..., "answer": "...
#### 18"}; the number behind #### becomes the ground truth, without commas. Rewards: `openai/gsm8k`
in `workers.rewards.functions`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

INSTRUCTION = 'Think step by step, then write the final number after "####".'


def make_row(line: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """One row in verl's schema."""
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


def convert(source: Path, folder: Path) -> Path:
    """Write the parquet file of one JSONL file; the name of the split is the file's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for number, text in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(make_row(json.loads(text), source.stem, len(rows)))
        except (KeyError, ValueError) as err:
            raise SystemExit(f"{source}, line {number} is not a line of GSM8K: {err}") from err
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{source.stem}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), target)
    return target


def main() -> None:
    """Command line of `convert`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="OUT", type=Path)
    parser.add_argument("files", metavar="FILE.jsonl", type=Path, nargs="+")
    args = parser.parse_args()
    for source in args.files:
        print(f"wrote {convert(source, args.folder)}")


if __name__ == "__main__":
    main()
