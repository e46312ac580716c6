"""Make a tiny model and rows for each of the two agent examples.

    python examples/agents/make.py guess DIR
    python examples/agents/make.py calculator DIR

Each command writes DIR/model and DIR/rows.jsonl. The weights of the guesser are random. The
calculator's model can call the tool and repeat its result, but mostly guesses: it solves about one
sum in six.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from verl_like.tiny import fit, make_model, make_tokenizer

CALL = '{"name": "add", "arguments": {"a": ', ', "b": ', "}}"
CALLS, SHOWN_STEPS = 0.2, 400
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def guesser() -> tuple[Any, Any, list[dict[str, Any]]]:
    """Return a model, its tokenizer, and 512 equal rows."""
    tokenizer = make_tokenizer([*map(str, range(1, 11)), "higher", "lower", "guess"], r"\d+|\w+")
    prompt = [{"role": "user", "content": "guess"}]
    return make_model(tokenizer), tokenizer, [{"prompt": prompt} for _ in range(512)]


def caller() -> tuple[Any, Any, list[dict[str, Any]]]:
    """Return a model, its tokenizer, and 512 rows that ask for sums of two numbers."""
    rng = random.Random(0)
    words = [*map(str, range(10, 59)), "+", "<add>", "<tool>", *CALL]
    tokenizer = make_tokenizer(words, "|".join(map(re.escape, sorted(words, key=len)[::-1])))
    tokenizer.chat_template = TEMPLATE
    model = make_model(tokenizer)
    show_calls(model, tokenizer, rng)
    rows = []
    for _ in range(512):
        a, b = a_number(rng), a_number(rng)
        prompt = [{"role": "user", "content": f"{a}+{b}"}]
        rows.append({"prompt": prompt, "answer": str(a + b)})
    return model, tokenizer, rows


def show_calls(model: Any, tokenizer: Any, rng: random.Random) -> None:
    """Train on guesses and on a few tool calls. A call is followed by its result, which is the
    answer.

    The results are not sums here, so the model cannot compute the answer from the question.
    """
    import torch

    rows, labels = [], []
    for _ in range(32 * SHOWN_STEPS):
        a, b, told = a_number(rng), a_number(rng), rng.randint(20, 58)
        parts = [f"<add><user>{a}+{b}<assistant>", f"{rng.randint(20, 58)}<eos>"]
        if rng.random() < CALLS:
            call = f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}<eos>"
            parts[1:] = call, f"<tool>{told}<assistant>", f"{told}<eos>"
        ids = tokenizer(parts, add_special_tokens=False)["input_ids"]
        label_parts = [[-100] * len(ids[n]) if n % 2 == 0 else ids[n] for n in range(len(ids))]
        rows.append(torch.tensor(sum(ids, [])))
        labels.append(torch.tensor(sum(label_parts, [])))
    pad = torch.nn.utils.rnn.pad_sequence
    fit(model, pad(rows, True), pad(labels, True, -100), steps=SHOWN_STEPS)


def a_number(rng: random.Random) -> int:
    """Return one of twenty numbers, each of which is a token."""
    return rng.randint(10, 29)


def main(kind: str, folder: Path) -> None:
    """Write the model and the rows."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model, tokenizer, rows = {"guess": guesser, "calculator": caller}[kind]()
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {folder}/model, {folder}/rows.jsonl")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
