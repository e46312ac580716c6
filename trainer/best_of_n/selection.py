"""The choice among the samples of each prompt, as rows of the files that other recipes read.

rows, metrics = select(samples, config.selection, tokenizer)
write_rows(path, rows)                                          # whole or not at all
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.best_of_n.config import SelectionConfig
from trainer.rollouts.samples import EXTRA
from verl_like.errors import BatchError
from verl_like.files import json_lines, lines_of, parse_json, write_whole
from workers.columns import read_columns
from workers.rewards.manager import decode_responses
from workers.rewards.weighted import SKIPPED

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

Row = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """A response of a prompt, and what its rewards say."""

    index: int
    text: str
    score: float
    finish_reason: str
    rewards: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, the best first; of equal scores the one drawn first."""

    uid: str
    prompt: Any
    data_source: str
    samples: list[Sample]


def select(
    batch: DataProto, config: SelectionConfig, tokenizer: Any
) -> tuple[list[Row], dict[str, float]]:
    """The rows of all prompts of a batch, in their order, and how many there are of what.

    A response without text teaches nothing and is left out, as is one that a failed reward skips.
    """
    rows: list[Row] = []
    counts = {"num_prompts": 0, "num_empty": 0, "num_below_min_score": 0, "num_equal": 0}
    for group in groups_of(batch, tokenizer):
        counts["num_prompts"] += 1
        good = [sample for sample in group.samples if sample.text.strip()]
        counts["num_empty"] += len(group.samples) - len(good)
        if config.min_score is not None and good and good[0].score < config.min_score:
            counts["num_below_min_score"] += 1
        elif config.write == "sft":
            rows += best_rows(group, good, config)
        elif len(good) > 1 and good[0].score > good[-1].score:
            rows.append(pair_row(group, good[0], good[-1]))
        else:
            counts["num_equal"] += 1

    if config.write == "sft":
        del counts["num_equal"]
    metrics = {f"selection/{name}": float(count) for name, count in counts.items()}
    return rows, {"selection/num_rows": float(len(rows)), **metrics}


def groups_of(batch: DataProto, tokenizer: Any) -> Iterator[Group]:
    """The samples of each prompt; those of one uid stand one after the other."""
    columns = batch.non_tensor_batch
    read = read_columns(batch, "token_level_scores", "sample_index")
    scores, indices = read["token_level_scores"].sum(dim=-1).tolist(), read["sample_index"].tolist()
    _refuse_no_numbers(scores, columns["uid"])
    texts = decode_responses(batch, tokenizer)
    own = {name: columns[name].tolist() for name in columns if name.startswith(EXTRA)}
    skipped = own.pop(SKIPPED, [0.0] * len(batch))

    found: dict[str, list[int]] = {}
    for row, uid in enumerate(columns["uid"]):
        found.setdefault(uid, []).append(row)
    for uid, places in found.items():
        samples = []
        for row in places:
            rewards = {name.removeprefix(EXTRA): _plain(own[name][row]) for name in own}
            reason = str(columns["finish_reason"][row])
            if not skipped[row]:
                samples.append(Sample(indices[row], texts[row], scores[row], reason, rewards))
        samples.sort(key=lambda sample: -sample.score)  # stable: of equal scores the first
        first = places[0]
        prompt, source = columns["raw_prompt"][first], columns["data_source"][first]
        yield Group(str(uid), prompt, str(source), samples)


def _refuse_no_numbers(scores: list[float], uids: Any) -> None:
    """Scores that are nan have no order."""
    bad = [f"{uid}" for uid, score in zip(uids, scores, strict=True) if not math.isfinite(score)]
    if bad:
        raise BatchError(
            f"the scores of {len(bad)} of {len(scores)} samples are nan or infinite, such as those "
            f"of uid {', '.join(bad[:3])}: the best cannot be told. Look at the reward model: its "
            "logits may have overflowed."
        )


def _plain(value: Any) -> Any:
    """What JSON has: nan, of a reward that failed, is null."""
    return None if isinstance(value, float) and value != value else value


def best_rows(group: Group, samples: list[Sample], config: SelectionConfig) -> Iterator[Row]:
    """The best samples of different texts as rows for `verl-like sft`."""
    seen: set[str] = set()
    for sample in samples:
        if config.min_score is not None and sample.score < config.min_score:
            return
        if sample.text in seen:
            continue
        seen.add(sample.text)
        yield {
            **_conversation(group.prompt, sample.text),
            **_about(group),
            "rank": len(seen),
            **_about_sample(sample),
        }
        if len(seen) == config.top_k:
            return


def pair_row(group: Group, best: Sample, worst: Sample) -> Row:
    """Best against worst, as `trainer.data.pairs` reads it."""
    sides = {}
    for side, sample in (("chosen", best), ("rejected", worst)):
        is_chat = not isinstance(group.prompt, str)
        sides[side] = [_answer(sample.text)] if is_chat else sample.text
    row: Row = {"prompt": _listed(group.prompt), **sides, **_about(group)}
    for side, sample in (("chosen", best), ("rejected", worst)):
        row |= {f"{side}_{name}": value for name, value in _about_sample(sample).items()}
    return row


def _conversation(prompt: Any, text: str) -> Row:
    if isinstance(prompt, str):
        return {"prompt": prompt, "response": text}
    return {"messages": [*_listed(prompt), _answer(text)]}


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _listed(prompt: Any) -> Any:
    """A prompt as JSON has it: parquet gives arrays of messages."""
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]


def _about(group: Group) -> Row:
    return {"uid": group.uid, "data_source": group.data_source}


def _about_sample(sample: Sample) -> Row:
    return {
        "sample": sample.index,
        "score": sample.score,
        "finish_reason": sample.finish_reason,
        "rewards": sample.rewards or None,
    }


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write them in order: parquet, if the name ends so, else a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        write_whole(path, _parquet(rows))
    else:
        write_whole(path, json_lines(rows))


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file of `write_rows`."""
    return [parse_json(line) for line in lines_of(path)]


def _parquet(rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
    contents: bytes = buffer.getvalue().to_pybytes()
    return contents
