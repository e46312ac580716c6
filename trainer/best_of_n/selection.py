"""Select the best samples of each prompt, and write them as rows for other recipes.

    rows, metrics = select(samples, config.selection, tokenizer)
    write_rows(path, rows)                                          # atomically

A sample of several turns becomes a row of `messages`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.best_of_n.recipe import SelectionConfig
from trainer.rollouts.samples import EXTRA
from trainer.rollouts.turns import POLICY, chats_of
from verl_like.errors import BatchError
from verl_like.files import json_lines, lines_of, parse_json, write_whole
from workers.agents.chat import Message
from workers.columns import read_columns
from workers.rewards.manager import decode_responses
from workers.rewards.weighted import SKIPPED
from workers.rollout.sample import LENGTH_LIMIT

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

Row = dict[str, Any]


@dataclass(frozen=True)
class ScoredSample:
    """A response to a prompt, with its score."""

    text: str
    score: float
    fields: Row
    """Further fields of its row: sample index, score, finish reason, and numbers from rewards."""
    messages: Sequence[Message] | None = None
    """The whole chat, if it has several turns."""

    @property
    def is_empty(self) -> bool:
        """True if a turn of the policy has no text."""
        texts = [message["content"] for message in self.messages or () if message["role"] == POLICY]
        return not all(text.strip() for text in texts or [self.text])


def select(
    batch: DataProto, config: SelectionConfig, tokenizer: Any
) -> tuple[list[Row], dict[str, float]]:
    """Return the selected rows of all prompts of a batch in order, and counts as metrics.

    A response without text is left out, because there is nothing to learn from it. So is a response
    that was skipped because a reward failed. Among equal texts, the response with the highest score
    is selected.
    """
    rows: list[Row] = []
    names = ("num_prompts", "num_empty", "num_cut", "num_below_min_score", "num_equal")
    counts = dict.fromkeys(names, 0)
    least = -math.inf if config.min_score is None else config.min_score
    for fields, prompt, samples in samples_by_prompt(batch, tokenizer):
        counts["num_prompts"] += 1
        good = [sample for sample in samples if not sample.is_empty]
        counts["num_empty"] += len(samples) - len(good)
        complete = [sample for sample in good if sample.fields["finish_reason"] != LENGTH_LIMIT]
        counts["num_cut"] += len(good) - len(complete)
        if config.truncated == "drop":
            good = complete
        if good and good[0].score < least:
            counts["num_below_min_score"] += 1
        elif config.format == "sft":
            first_of_text = {sample.text: sample for sample in reversed(good)}
            best = [s for s in good if s.score >= least and first_of_text[s.text] is s]
            for rank, sample in enumerate(best[: config.top_k], start=1):
                chat: Row = {"prompt": prompt, "response": sample.text}
                if sample.messages is not None:
                    chat = {"messages": sample.messages}
                rows.append({**chat, **fields, "rank": rank, **sample.fields})
        elif len(good) > 1 and good[0].score > good[-1].score:
            rows.append(pair_row(prompt, fields, good[0], good[-1]))
        else:
            counts["num_equal"] += 1

    if config.format == "sft":
        del counts["num_equal"]
    metrics = {f"selection/{name}": float(count) for name, count in counts.items()}
    return rows, {"selection/num_rows": float(len(rows)), **metrics}


def samples_by_prompt(
    batch: DataProto, tokenizer: Any
) -> Iterator[tuple[Row, Any, list[ScoredSample]]]:
    """Yield, for each prompt (uid), the fields that its rows share, the prompt, and its samples.

    Samples are sorted by score, the best first; samples of equal scores keep their order.
    """
    columns = batch.non_tensor_batch
    read = read_columns(batch, "token_level_scores", "sample_index")
    scores, indices = read["token_level_scores"].sum(dim=-1).tolist(), read["sample_index"].tolist()
    named_scores = zip(columns["uid"], scores, strict=True)
    bad = [f"{uid}" for uid, score in named_scores if not math.isfinite(score)]
    if bad:
        raise BatchError(
            f"the scores of {len(bad)} of {len(scores)} samples are nan or infinite, such as "
            f"those of uid {', '.join(bad[:3])}, so the best sample is unknown. Check the reward "
            "model: its logits may have overflowed."
        )
    texts = decode_responses(batch, tokenizer)
    extras = {name: columns[name].tolist() for name in columns if name.startswith(EXTRA)}
    skipped = extras.pop(SKIPPED, [0.0] * len(batch))

    chats = chats_of(batch, tokenizer)

    rows_of_uid: dict[str, list[int]] = {}
    for row, uid in enumerate(columns["uid"]):
        rows_of_uid.setdefault(str(uid), []).append(row)
    for uid, rows in rows_of_uid.items():
        samples = []
        for row in rows:
            rewards = {name.removeprefix(EXTRA): _plain(extras[name][row]) for name in extras}
            fields = {
                "sample": indices[row],
                "score": scores[row],
                "finish_reason": str(columns["finish_reason"][row]),
                "rewards": rewards or None,
            }
            if not skipped[row]:
                samples.append(ScoredSample(texts[row], scores[row], fields, chats[row]))
        samples.sort(key=lambda sample: -sample.score)  # stable
        prompt, source = columns["raw_prompt"][rows[0]], str(columns["data_source"][rows[0]])
        if not isinstance(prompt, str):  # Parquet gives arrays of messages
            prompt = [dict(message) for message in prompt]
        yield {"uid": uid, "data_source": source}, prompt, samples


def _plain(value: Any) -> Any:
    """Return a value for JSON: nan, which a failed reward gives, becomes null."""
    return None if isinstance(value, float) and value != value else value


def pair_row(prompt: Any, fields: Row, best: ScoredSample, worst: ScoredSample) -> Row:
    """Return the best and the worst sample as a row for `trainer.data.pairs`."""
    sides = {"chosen": best, "rejected": worst}
    row = {"prompt": prompt, "chosen": best.text, "rejected": worst.text, **fields}
    for side, sample in sides.items():
        row |= {f"{side}_{name}": value for name, value in sample.fields.items()}
    return row


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows in order: as Parquet if the file name says so, otherwise as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".parquet":
        write_whole(path, json_lines(rows))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
    write_whole(path, buffer.getvalue().to_pybytes())


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a JSONL file that `write_rows` wrote."""
    return [parse_json(line) for line in lines_of(path)]
