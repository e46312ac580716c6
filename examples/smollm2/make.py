"""Write the prompts of the results on SmolLM2.

    python examples/smollm2/make.py FOLDER
    python examples/smollm2/make.py --pairs RUN FOLDER

FOLDER gets, each for training and for the test (`_val`):

- `people`: a prompt asks for a sentence about a person as a JSON object. No name and city of the
  test is in the training, and half of its sentences have a form that is not there. `people_sft`
  are the prompts of the training with their answers.
- `shop`: a word problem for `shop.py`. Its numbers are odd in the test and even in the training,
  and the goods are others. `shop_sft` are 48 of the training, solved.
- `sentences`: a prompt asks for a sentence about a thing, with an adjective.
- `pairs`, from RUN, an evaluation on `sentences_train` with several samples: the sample with the
  highest and the one with the lowest score of each prompt.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

NAMES = {
    "train": "Tom Anna Peter Maria Lucas Emma Noah Olivia Liam Sofia Jack Mia Oscar Ruth Ivan Eva",
    "val": "Hugo Nina Paul Sara Leo Julia Max Laura",
}
CITIES = {
    "train": "Paris London Rome Madrid Berlin Oslo Vienna Athens Lisbon Dublin Cairo Tokyo",
    "val": "Delhi Lima Boston Chicago Prague Seoul",
}
FORMS = {
    "train": [
        "{name} is {age} years old and lives in {city}.",
        "{name}, who is {age}, comes from {city}.",
        "In {city} lives {name}, aged {age}.",
        "My name is {name}, I am {age}, and I live in {city}.",
        "{name} ({age}) moved to {city} last year.",
        "At the age of {age}, {name} opened a shop in {city}.",
    ],
    "val": [
        "Our guest from {city} is {name}, {age} years old.",
        "{name} works in {city} and turned {age} in May.",
    ],
}
QUESTION = 'Write a JSON object with the keys "name", "age" and "city". Text: '
GOODS = {
    "train": ("pens", "apples", "cups", "books", "coins", "stamps"),
    "val": ("eggs", "nails", "cards", "balls"),
}
PROBLEMS = {
    "*": "A box holds {a} {goods}. How many {goods} are in {b} boxes?",
    "+": "Tom has {a} {goods} and buys {b} more. How many {goods} does he have now?",
    "-": "A shop had {a} {goods} and sold {b} of them. How many {goods} are left?",
}
CALCULATE = (
    "Write calc and the calculation that answers the question.\n"
    "When you get the result, answer with this number only.\n"
)
ADJECTIVES = "big new old red small".split()
THINGS = {
    "train": """
        apple bag bed bell bird boat book bottle box bread bridge brush bus cake camera car cat
        chair church clock cloud coat coin cow cup desk dog door dress drum egg engine eye farm
        fence field fire fish flag flower fork fridge garden gate glass goat guitar hammer hat hill
        horse house key kitchen kite knife ladder lake lamp leaf letter map market
        """,
    "val": """
        mirror mountain mouse nail needle nose ocean oven page park pen phone piano pillow plane
        plate pond radio ring river
        """,
}
NUM_PEOPLE = {"train": 1000, "val": 200}
NUM_SHOPS = {"train": 400, "val": 100}
NUM_PLAYED = 48
NUM_PAIRS_TO_TEST = 40

Row = dict[str, Any]


def people(split: str) -> list[Row]:
    """Return different sentences with their right answers."""
    rng = random.Random(split)
    rows: dict[str, Row] = {}
    while len(rows) < NUM_PEOPLE[split]:
        person = {
            "name": rng.choice(NAMES[split].split()),
            "age": rng.randint(5, 95),
            "city": rng.choice(CITIES[split].split()),
        }
        is_new_form = split == "val" and len(rows) % 2 == 0
        sentence = rng.choice(FORMS["val" if is_new_form else "train"]).format(**person)
        rows.setdefault(sentence, prompt(QUESTION + sentence) | {"answer": json.dumps(person)})
    return list(rows.values())


def shops(split: str) -> list[Row]:
    """Return word problems with sums, differences and products of two-digit numbers."""
    rng = random.Random(split)
    rows = []
    for number in range(NUM_SHOPS[split]):
        sign = "+-*"[number % 3]
        b, a = sorted(2 * rng.randint(6, 49) + (split == "val") for _ in "ab")
        problem = PROBLEMS[sign].format(a=a, b=b, goods=rng.choice(GOODS[split]))
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        columns = {"calculation": f"{a} {sign} {b}", "result": result}
        rows.append(prompt(CALCULATE + problem) | columns)
    return rows


def played(row: Row) -> Row:
    """Return a chat for SFT that solves a word problem."""
    result = str(row["result"])
    call = {"role": "assistant", "content": f"calc {row['calculation']}"}
    answer = {"role": "assistant", "content": result}
    return {"messages": [*row["prompt"], call, {"role": "user", "content": result}, answer]}


def prompt(text: str) -> Row:
    """Return a row with a prompt of the user."""
    return {"prompt": [{"role": "user", "content": text}]}


def chat(row: Row) -> Row:
    """Return a row for SFT: the prompt with its answer."""
    return {"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]}


def pairs(run: Path) -> list[Row]:
    """Return the best and the worst sample of each prompt that an evaluation has sampled."""
    (file,) = (run / "validation").glob("*.jsonl")
    samples = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    rows = []
    for _, group in groupby(samples, key=lambda sample: sample["uid"]):
        worst, *_, best = sorted(group, key=lambda sample: sample["score"])
        if best["score"] > worst["score"]:
            text = best["input"].rpartition("user\n")[2].removesuffix("\nassistant\n")
            rows.append(prompt(text) | {"chosen": best["output"], "rejected": worst["output"]})
    return rows


def write(file: Path, rows: Sequence[Row]) -> None:
    """Write a file of rows."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Write the rows."""
    folder = Path(arguments[-1])
    folder.mkdir(parents=True, exist_ok=True)
    if arguments[0] == "--pairs":
        rows = pairs(Path(arguments[1]))
        write(folder / "pairs_train.jsonl", rows[NUM_PAIRS_TO_TEST:])
        write(folder / "pairs_val.jsonl", rows[:NUM_PAIRS_TO_TEST])
        return
    for split in ("train", "val"):
        write(folder / f"people_{split}.jsonl", people(split))
        write(folder / f"shop_{split}.jsonl", shops(split))
        things = [f"{a} {thing}" for thing in THINGS[split].split() for a in ADJECTIVES]
        sentences = [prompt(f"Write one short sentence about the {thing}.") for thing in things]
        write(folder / f"sentences_{split}.jsonl", sentences)
    write(folder / "people_sft.jsonl", [chat(row) for row in people("train")])
    write(folder / "shop_sft.jsonl", [played(row) for row in shops("train")[:NUM_PLAYED]])


if __name__ == "__main__":
    main(sys.argv[1:])
