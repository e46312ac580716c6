"""Show what each step of the pipeline changed: numbers and texts before and after it.

    python evaluate.py RUN_DIR BASE SFT PPO REWARD_MODEL

The script samples responses of the three policies to the validation prompts. It scores them with
the rule `kindness` and with the reward model, and writes RUN_DIR/report.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from kindness import kindness
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

MAX_TOKENS, NUM_SHOWN, PPO_STEPS_SHOWN = 32, 6, 5


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def respond(folder: str, prompts: list[str], tokenizer: Any) -> list[list[int]]:
    """Sample one response per prompt, including its end token; the same responses every time."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    batch = tokenizer(
        prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
    )
    torch.manual_seed(0)
    sampled = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=MAX_TOKENS)
    responses = sampled[:, batch["input_ids"].shape[1] :].tolist()
    return [up_to_end(tokens, tokenizer.eos_token_id) for tokens in responses]


def up_to_end(tokens: list[int], end: int) -> list[int]:
    """Return the tokens up to and including the first end token."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@torch.no_grad()
def preferences(scorer: Any, prompts: list[str], responses: list[list[int]], tokenizer: Any) -> Any:
    """Return the reward model's score for every prompt with its response."""
    ids = [
        tokenizer(prompt, add_special_tokens=False)["input_ids"] + response
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    batch = tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
    return scorer(**batch).logits[:, 0]


def evaluate(folders: dict[str, str], scorer_folder: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the report's lines with a table of the policies' scores and a table of responses."""
    tokenizer = AutoTokenizer.from_pretrained(folders["base"])
    scorer = AutoModelForSequenceClassification.from_pretrained(scorer_folder).eval()
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in rows
    ]
    table = ["| | sentences about the animal | kindness | reward model |", "|---|---|---|---|"]
    texts: dict[str, list[str]] = {}
    for name, folder in folders.items():
        responses = respond(folder, prompts, tokenizer)
        texts[name] = tokenizer.batch_decode(responses, skip_special_tokens=True)
        scores = [
            kindness(text, row["reward_model"]["ground_truth"])
            for text, row in zip(texts[name], rows, strict=True)
        ]
        shares = [sum(s[key] for s in scores) / len(scores) for key in ("is_sentence", "score")]
        preferred = float(preferences(scorer, prompts, responses, tokenizer).mean())
        table.append(f"| {name} | {shares[0]:.0%} | {shares[1]:.2f} | {preferred:.2f} |")

    responses_table = [f"| prompt | {' | '.join(folders)} |", "|---" * (len(folders) + 1) + "|"]
    for number in range(NUM_SHOWN):
        cells = [repr(texts[name][number]).replace("|", "\\|") for name in folders]
        responses_table.append(f"| {rows[number]['prompt'][0]['content']} | {' | '.join(cells)} |")
    return [*table, "", "## What they say", "", *responses_table]


def curve(run_dir: Path, step: str, metrics: dict[str, str], shown: int = 0) -> list[str]:
    """Return the report's lines with a table of metrics, of every step or about `shown` steps."""
    of_all = read_lines(run_dir / step / "metrics.jsonl")
    lines = [line for line in of_all if metrics.keys() <= line.keys()]
    every = max(1, (len(lines) - 1) // shown) if shown else 1
    table = [f"| step | {' | '.join(metrics.values())} |", "|---" * (len(metrics) + 1) + "|"]
    for line in lines[::every]:
        table.append(f"| {line['step']} | {' | '.join(f'{line[key]:.3f}' for key in metrics)} |")
    return [*table, "", f"All curves: [{step}/report.html]({step}/report.html)", ""]


def main(run_dir: Path, base: str, sft: str, ppo: str, scorer: str) -> None:
    """Write the report, and print the table of scores."""
    rows = read_lines(run_dir / "data" / "prompts_val.jsonl")
    scores_table = evaluate({"base": base, "SFT": sft, "PPO": ppo}, scorer, rows)
    of_ppo = {
        "reward/preference_score/mean": "reward model",
        "reward/kindness_score/mean": "kindness",
        "actor/reward_kl_penalty": "KL to the SFT model",
        "actor/ptx_loss": "PTX loss",
    }
    report = [
        "# SFT, reward model, PPO",
        "",
        f"Samples at temperature 1 for {len(rows)} validation prompts. PPO was not trained with "
        "the rule kindness.",
        "",
        *scores_table,
        "",
        "## Supervised fine-tuning",
        "",
        *curve(run_dir, "sft", {"val/loss": "loss of held-out responses"}),
        "## Reward model",
        "",
        *curve(run_dir, "reward_model", {"val-core/rm/accuracy": "accuracy on held-out pairs"}),
        "## PPO",
        "",
        *curve(run_dir, "ppo", of_ppo, PPO_STEPS_SHOWN),
    ]
    (run_dir / "report.md").write_text("\n".join(report), encoding="utf-8")
    print("\n".join(scores_table))
    print(f"\nreport: {run_dir}/report.md")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
