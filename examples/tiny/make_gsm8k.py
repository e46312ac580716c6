"""Make a tiny chat model that solves some sums, and rows of sums in GSM8K's format.

    python examples/tiny/make_gsm8k.py DIR

The script writes DIR/train.jsonl, DIR/test.jsonl and DIR/model: a Llama with a token for each word
of the sums, trained from random weights until it solves about a third of them.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from runpy import run_path

from verl_like.tiny import fit_answers, make_model, make_tokenizer

PREPARE = Path(__file__).resolve().parents[1] / "data" / "prepare_gsm8k.py"
make_row = run_path(str(PREPARE))["make_row"]

NUM_ROWS = {"train": 2048, "test": 64}
LARGEST = 5
NAMES, THINGS = ("Ann", "Ben", "Cleo", "Dan"), ("pens", "eggs", "cards", "shells")
WORD = r" ?[A-Za-z]+| ?[0-9]+|#+|[\s\S]"


def make_sums(split: str) -> list[dict[str, str]]:
    """Return rows in GSM8K's format: a question, and an answer that ends with `#### <number>`."""
    rng = random.Random(split)
    lines = []
    for _ in range(NUM_ROWS[split]):
        a, b = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
        who, thing = rng.choice(NAMES), rng.choice(THINGS)
        question = f"{who} has {a} {thing} and buys {b}. How many now?"
        lines.append({"question": question, "answer": f"#### {a + b}"})
    return lines


def main(folder: Path) -> None:
    """Write the rows and the model."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = {split: make_sums(split) for split in NUM_ROWS}
    for split, lines in sums.items():
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")

    prompts = [make_row(line, "train", 0)["prompt"] for line in sums["train"]]
    answers = [line["answer"] for line in sums["train"]]
    texts = [prompt[0]["content"] + answer for prompt, answer in zip(prompts, answers, strict=True)]
    words = sorted({word for text in texts for word in re.findall(WORD, text)})
    tokenizer = make_tokenizer(words, WORD)
    model = make_model(tokenizer, hidden_size=128)
    fit_answers(model, tokenizer, prompts, answers)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    print(f"wrote {folder}/model, {folder}/train.jsonl, {folder}/test.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
