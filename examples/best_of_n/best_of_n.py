"""Rejection sampling: write the best of several samples of each prompt as rows for another run.

    python examples/best_of_n/best_of_n.py data.val_files=train.parquet \\
        actor_rollout_ref.model.path=MODEL trainer.default_local_dir=runs/best \\
        actor_rollout_ref.rollout.val_kwargs='{n: 16, do_sample: true, temperature: 1.0}'
    verl-like sft model.path=MODEL data.train_files=runs/best/best.jsonl
    verl-like dpo model.path=MODEL data.train_files=runs/best/pairs.jsonl

Data, model, engine, rewards and placement are set as for `verl-like eval`. `best.jsonl` has each
prompt's best response, and `pairs.jsonl` its best and worst, if their scores differ. Responses
without text, or whose reward failed, are left out. The rows of a killed run stay in its folder, and
the same command samples the other prompts.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from verl_like import DataProto, load_config, run
from verl_like.extend import (
    EVAL,
    Evaluation,
    decode_responses,
    read_columns,
    repeat_prompts,
    trajectory_chats,
)

Row = dict[str, Any]
SKIPPED = "reward_extra/skipped"
"""Column that is 1 if a sample is left out because a reward failed; else 0."""


class BestOfN(Evaluation):
    """Samples and scores the prompts, one batch of `data.train_batch_size` after the other."""

    recipe = replace(Evaluation.recipe, stages=("sample", "score"))

    def step(self) -> dict[str, float]:
        """Write the rows of all prompts; return the mean score, and the mean of the best."""
        sampling = asdict(self.config.actor_rollout_ref.rollout.validation)
        num_samples = sampling.pop("n")
        done = {row["uid"] for row in rows_in(self.run.folder / "best.jsonl")}
        scores, best_scores = list[float](), list[float]()
        for prompts in self.prompts.in_order():
            rest = [n for n, uid in enumerate(prompts.non_tensor_batch["uid"]) if uid not in done]
            if not rest:
                continue
            batch = repeat_prompts(prompts.select_idxs(rest), num_samples)
            with self.clock("sample"):
                batch = self.rollouts.generate(batch, validate=True, **sampling)
            with self.clock("score"):
                batch, _ = self.rollouts.score(batch, normalize=False)
            for samples in by_prompt(batch, self.rollouts.tokenizer):
                scores += [sample["score"] for sample in samples]
                best_scores.append(samples[0]["score"])
                self.write(samples)
        names = {"score/mean": scores, "score/best": best_scores}
        return {name: sum(values) / len(values) for name, values in names.items() if values}

    def write(self, samples: list[Row]) -> None:
        """Append the best sample, and the best with the worst, to their files."""
        best, worst = samples[0], samples[-1]
        if best["score"] > worst["score"] and "messages" not in best:
            pair = {name: best[name] for name in ("prompt", "uid", "data_source")}
            for side, sample in (("chosen", best), ("rejected", worst)):
                pair |= {side: sample["response"]}
                pair |= {f"{side}_{name}": sample[name] for name in ("score", "finish_reason")}
            append(self.run.folder / "pairs.jsonl", pair)
        append(self.run.folder / "best.jsonl", best)


def by_prompt(batch: DataProto, tokenizer: Any) -> list[list[Row]]:
    """Return the usable samples of each prompt, the best first; prompts without one are left out.

    `finish_reason` is "length" if the response was cut; SFT then leaves out the end token. A
    trajectory of an environment becomes a chat.
    """
    columns = batch.non_tensor_batch
    skipped = columns.get(SKIPPED, [0] * len(batch))
    texts, chats = decode_responses(batch, tokenizer), trajectory_chats(batch, tokenizer)
    scores = read_columns(batch, "token_level_scores")["token_level_scores"].sum(dim=-1).tolist()
    samples: dict[str, list[Row]] = defaultdict(list)
    for n, score in enumerate(scores):
        replies = [m["content"] for m in chats[n] or () if m["role"] == "assistant"] or [texts[n]]
        if all(reply.strip() for reply in replies) and not skipped[n]:
            prompt = columns["raw_prompt"][n]
            prompt = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
            chat = {"messages": chats[n]} if chats[n] else {"prompt": prompt, "response": texts[n]}
            row = {**chat, "score": score}
            row |= {name: str(columns[name][n]) for name in ("uid", "data_source", "finish_reason")}
            samples[row["uid"]].append(row)
    return [sorted(rows, key=lambda row: -row["score"]) for rows in samples.values()]


def append(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def rows_in(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    run(load_config(sys.argv[1:], EVAL), BestOfN)
