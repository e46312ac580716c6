"""A hash of what an engine read and sampled, which the trainer checks.

    number = draw_hash(sample)      # next to the engine, for the column "draw_hash"
    check_draws(batch)              # before the update

The hash covers the prompt, the response, the version of the weights for each token, which also
marks observed tokens, and the begins of segments. So no tokenizer, stage or hook can change a
sample unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import Ragged
from verl_like.errors import BatchError
from workers.columns import has_column, read_columns, require, token_counts
from workers.rollout.sample import Sample

COLUMN = "draw_hash"
NAMED = 3
"""Number of samples that an error names."""


def draw_hash(sample: Sample) -> int:
    """Return the hash of a sample's inputs and sampled tokens."""
    prompt, versions = np.asarray(sample.prompt), sample.versions.numpy()
    return _hash(prompt, sample.tokens.numpy(), versions, sample.segments)


def check_draws(batch: DataProto) -> dict[str, float]:
    """Reject rows that were changed since sampling, or that train observed tokens; return metrics.

    A batch from another engine has no hashes, and is not checked.
    """
    if not has_column(batch, COLUMN):
        return {}
    require(batch, "prompts", "responses", "token_versions", "position_ids")
    mask = read_columns(batch, "response_mask")["response_mask"]
    is_observed = batch.padded("token_versions") < 0
    prompts = _rows(batch, "prompts", of_response=False)
    named = prompts, _rows(batch, "responses"), _rows(batch, "token_versions"), _segments(batch)
    expected = read_columns(batch, COLUMN)[COLUMN].tolist()
    wrong = [
        row
        for row, (*parts, number) in enumerate(zip(*named, expected, strict=True))
        if _hash(*parts) != number
    ]
    observed = (mask.bool() & is_observed).any(dim=-1).nonzero().flatten().tolist()
    if wrong := sorted({*wrong, *observed}):
        uids, indices = batch.non_tensor_batch["uid"], batch.padded("sample_index").tolist()
        names = ", ".join(f"{uids[row]}/{indices[row]}" for row in wrong[:NAMED])
        raise BatchError(
            f"{len(wrong)} of {len(batch)} samples are not what the rollout drew, by their hashes "
            f"(uid/index: {names}{', …' if len(wrong) > NAMED else ''}): prompts, responses, "
            "token_versions, position_ids or response_mask were changed since. A stage or hook "
            f"that means to train other tokens drops the column {COLUMN!r}."
        )
    return {"training/num_proven_samples": float(len(batch))}


def _rows(batch: DataProto, name: str, of_response: bool = True) -> Sequence[np.ndarray]:
    """Return the rows of a column without padding."""
    column = batch.column(name)
    if isinstance(column, Ragged):
        return [row.numpy() for row in column.rows()]
    counts = token_counts(batch)[of_response].tolist()
    width = column.shape[1]
    spans = [slice(0, n) if of_response else slice(width - n, width) for n in counts]
    return [row[span].numpy() for row, span in zip(column, spans, strict=True)]


def _segments(batch: DataProto) -> list[list[int]]:
    """Return the positions in every response where position ids restart."""
    begins = batch.padded("position_ids")[:, -batch.column("responses").shape[-1] :] == 0
    begins &= torch.arange(begins.shape[1]) < token_counts(batch)[1][:, None]
    segments: list[list[int]] = [[] for _ in range(len(batch))]
    for row, place in begins.nonzero().tolist():
        segments[row].append(place)
    return segments


def _hash(
    prompt: np.ndarray, tokens: np.ndarray, versions: np.ndarray, segments: Sequence[int]
) -> int:
    digest = hashlib.blake2b(len(prompt).to_bytes(8, "little"), digest_size=8)
    for part in (prompt, tokens, versions, segments):
        digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)
