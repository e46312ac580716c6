"""Make a base model with random weights, and the rows for every step.

    python examples/rlhf_pipeline/make_data.py DIR

The script writes DIR/base (a Llama with a character tokenizer, as in make-tiny) and

    sft.jsonl, sft_val.jsonl        a prompt and any sentence about its animal, kind or not
    pairs.jsonl, pairs_val.jsonl    the kinder of two sentences is `chosen`; in about half of the
                                    rows, `rejected` is garbled or about another animal instead
    prompts.jsonl, prompts_val.jsonl    prompts for PPO, with the animal as ground truth
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kindness import ADJECTIVES, ANIMALS, VERBS, kindness

from verl_like.tiny import make_model, make_tokenizer

ASKS = ("tell of a", "write of a", "say of a")
Row = dict[str, Any]


def question(rng: random.Random) -> tuple[str, str]:
    """Return a prompt, and the animal that it asks for."""
    animal = rng.choice(ANIMALS)
    return f"{rng.choice(ASKS)} {animal}", animal


def sentence(rng: random.Random, animal: str) -> str:
    """Return a random sentence about the animal."""
    return f"the {rng.choice(ADJECTIVES)} {animal} {rng.choice(VERBS)}."


def chat(prompt: str) -> list[Row]:
    """Return the prompt as messages."""
    return [{"role": "user", "content": prompt}]


def demonstration(rng: random.Random) -> Row:
    """Return a prompt with a response for supervised fine-tuning."""
    prompt, animal = question(rng)
    return {"prompt": chat(prompt), "response": sentence(rng, animal)}


def pair(rng: random.Random) -> Row:
    """Return a prompt with two responses; about half of the rejected ones are broken."""
    prompt, animal = question(rng)
    texts = [sentence(rng, animal), sentence(rng, animal)]
    if rng.random() < 0.4:
        texts[1] = broken(rng, texts[1], animal)
        chosen, rejected = texts
    else:
        rejected, chosen = sorted(texts, key=lambda text: kindness(text, animal)["score"])
        if kindness(chosen, animal) == kindness(rejected, animal):
            return pair(rng)
    return {"prompt": chat(prompt), "chosen": chosen, "rejected": rejected}


def broken(rng: random.Random, text: str, animal: str) -> str:
    """Return the sentence about another animal, or with a word or letter left out or doubled."""
    if rng.random() < 0.5:
        return text.replace(animal, rng.choice([other for other in ANIMALS if other != animal]))
    pieces, joint = rng.choice(((text.split(), " "), (list(text), "")))
    place = rng.randrange(len(pieces))
    pieces[place : place + 1] = rng.choice(([], [pieces[place]] * 2))
    return joint.join(pieces)


def prompt_row(rng: random.Random) -> Row:
    """Return a prompt for PPO."""
    prompt, animal = question(rng)
    return {
        "data_source": "kindness",
        "prompt": chat(prompt),
        "reward_model": {"style": "rule", "ground_truth": animal},
    }


FILES: dict[str, tuple[Callable[[random.Random], Row], int]] = {
    "sft": (demonstration, 8192),
    "sft_val": (demonstration, 256),
    "pairs": (pair, 3200),
    "pairs_val": (pair, 256),
    "prompts": (prompt_row, 1024),
    "prompts_val": (prompt_row, 64),
}


def main(folder: Path, seed: int = 0) -> None:
    """Write the model and all files."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "base")
    make_model(tokenizer, seed).save_pretrained(folder / "base")
    for name, (make_row, num_rows) in FILES.items():
        rng = random.Random(f"{seed}-{name}")
        lines = [json.dumps(make_row(rng)) for _ in range(num_rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
