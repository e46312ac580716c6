"""Convert prompt rows to samples for an engine, and samples to rows of a batch.

Each row has a hash of the tokens that the engine read and sampled (`sample_hash`). The trainer
checks it before the update (`check_sample_hashes`), so a tokenizer, stage or hook cannot change
these tokens unnoticed, unless it drops the column. The hash covers the prompt, the response, the
weight version of each token (which also marks observed tokens), where segments start, and the bytes
of the images. It does not cover other columns, such as log-probs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import ColumnValues, RaggedTensor
from verl_like.errors import BatchError, RolloutError
from workers.columns import IMAGES, ROUTED, read_columns, require, token_counts
from workers.rollout.sample import Sample

REQUEST = "request"
"""Column with the request numbers of submitted rows, by which the client finds their samples."""
TRUNCATED = "rollout_truncated_log_probs"
SeedOf = Callable[[str, int], int]
"""A function that maps uid and sample index to the seed of the sample (`sample_seed`)."""


def read_samples(data: DataProto, prompt_width: int, seed_of: SeedOf) -> list[Sample]:
    """Return one sample, still without a response, per row that is not padding.

    The optional column `end_at` limits the response tokens of each sample.
    """
    require(data, "input_ids", "attention_mask", "sample_index", "uid")
    ids = data.column("input_ids")
    if ids.shape[1] != prompt_width:
        raise RolloutError(
            f"rollout: prompts are {ids.shape[1]} columns wide, but data.max_prompt_length is "
            f"{prompt_width}. Pad them to this width on the left, and do not pass a batch that "
            "already has responses."
        )
    prompts: Sequence[Tensor]
    if isinstance(ids, RaggedTensor):
        prompts = ids.rows()
    else:
        masks = data.padded("attention_mask") != 0
        prompts = [row[mask] for row, mask in zip(ids, masks, strict=True)]
    indices, uids = data.padded("sample_index").tolist(), data.non_tensor_batch["uid"]
    images = data.non_tensor_batch.get(IMAGES, [()] * len(data))
    ends = data.padded("end_at").tolist() if "end_at" in data.columns else [None] * len(data)
    samples = []
    for row, prompt in enumerate(prompts[: data.num_real_rows]):
        uid, index = str(uids[row]), indices[row]
        name = f"uid {uid} sample {index}"
        refs: tuple[Any, ...] = tuple(tuple(ref) for ref in images[row])
        seed = seed_of(uid, index)
        samples.append(Sample(prompt.tolist(), seed, name, end_at=ends[row], images=refs))
    return samples


def to_batch(
    samples: Sequence[Sample],
    widths: tuple[int, int],
    pad: int,
    version: int,
    truncated: bool = False,
    no_choices: Tensor | None = None,
) -> DataProto:
    """Return a batch with one row per sample; `widths` has the widths of prompts and responses.

    `version` is the engine's version, which is recorded for responses without sampled tokens. If
    `no_choices` (an empty tensor of expert choices) is given, the batch has a column with the
    expert choices of every token.
    """
    prompts = [torch.tensor(sample.prompt, dtype=torch.long) for sample in samples]
    responses = RaggedTensor.from_rows([sample.tokens for sample in samples], widths[1], fill=pad)
    tokens = [
        torch.cat([prompt, sample.tokens]) for prompt, sample in zip(prompts, samples, strict=True)
    ]
    starts = widths[0] - torch.tensor([len(prompt) for prompt in prompts])
    lengths, values = torch.tensor([len(row) for row in tokens]), torch.cat(tokens)
    ids = RaggedTensor(values, lengths, sum(widths), starts, pad)
    positions: list[Tensor] = []
    oldest: list[int] = []
    """By sample: the weight version of its oldest sampled token, or the engine's version."""
    for sample in samples:
        # each segment begins at position 0
        begins = [0, *(len(sample.prompt) + begin for begin in sample.segments)]
        ends = [*begins[1:], len(sample.prompt) + len(sample.tokens)]
        positions += [torch.arange(end - begin) for begin, end in zip(begins, ends, strict=True)]
        sampled = sample.versions[sample.is_sampled]
        oldest.append(int(sampled.min()) if len(sampled) else version)
    columns: dict[str, ColumnValues] = {
        "prompts": RaggedTensor.from_rows(prompts, widths[0], at_end=True, fill=pad),
        "responses": responses,
        "input_ids": ids,
        "attention_mask": ids.with_values(torch.ones_like(values)),
        "position_ids": ids.with_values(torch.cat(positions)),
        "response_mask": responses.with_values(torch.cat([s.is_sampled for s in samples]).long()),
        "rollout_log_probs": responses.with_values(torch.cat([s.log_probs for s in samples])),
        "token_versions": responses.with_values(torch.cat([s.versions for s in samples])),
        "policy_version": torch.tensor(oldest),
        "sample_hash": torch.tensor([sample_hash(sample) for sample in samples]),
    }
    if truncated:
        log_probs = [s.truncated_log_probs for s in samples if s.truncated_log_probs is not None]
        columns[TRUNCATED] = responses.with_values(torch.cat([torch.empty(0), *log_probs]))
    if no_choices is not None:
        chosen = [_choices(sample, no_choices) for sample in samples]
        columns[ROUTED] = ids.with_values(torch.cat([no_choices, *chosen]))
    return DataProto.from_dict(columns, {"finish_reason": [s.finish_reason for s in samples]})


def _choices(sample: Sample, no_choices: Tensor) -> Tensor:
    """Return the expert choices [tokens, layers, choices] for the prompt and the response.

    They are zero for tokens that the engine did not read, such as the last one.
    """
    chosen = no_choices if sample.routed_experts is None else sample.routed_experts
    sampled = sample.is_sampled.nonzero().flatten()
    needed = len(sample.prompt) + int(sampled[-1]) if len(sampled) else 0
    if len(chosen) < needed:
        raise RolloutError(
            f"rollout: {sample.name} has the experts of {len(chosen)} tokens, but its "
            f"last token was sampled after {needed} tokens. The engine must return the experts of "
            "all of them."
        )
    length = len(sample.prompt) + len(sample.tokens)
    return torch.cat([chosen, chosen.new_zeros(length - len(chosen), *chosen.shape[1:])])


COLUMN = "sample_hash"
NAMED = 3
"""Maximum number of samples that an error names."""


def sample_hash(sample: Sample) -> int:
    """Return the hash of a sample's prompt, response, weight versions, segments and images."""
    prompt, versions = np.asarray(sample.prompt), sample.versions.numpy()
    return _hash(prompt, sample.tokens.numpy(), versions, sample.segments, sample.images)


def check_sample_hashes(batch: DataProto) -> dict[str, float]:
    """Reject rows that changed since sampling, or have observed tokens in the loss; return metrics.

    A batch without the hash column, such as one from a rollout of your own, is not checked.
    """
    if COLUMN not in batch.columns:
        return {}
    require(batch, "prompts", "responses", "token_versions", "position_ids")
    mask = read_columns(batch, "response_mask")["response_mask"]
    is_observed = batch.padded("token_versions") < 0
    named: Sequence[Sequence[Any]] = (
        _rows(batch, "prompts", of_response=False),
        _rows(batch, "responses"),
        _rows(batch, "token_versions"),
        _segments(batch),
        list(batch.non_tensor_batch.get(IMAGES, [()] * len(batch))),
    )
    expected = read_columns(batch, COLUMN)[COLUMN].tolist()
    wrong = [
        row
        for row, (*parts, number) in enumerate(zip(*named, expected, strict=True))
        if _hash(*parts) != number
    ]
    observed = (mask.bool() & is_observed).any(dim=-1).nonzero().flatten().tolist()
    wrong = sorted({*wrong, *observed})
    if wrong:
        uids, indices = batch.non_tensor_batch["uid"], batch.padded("sample_index").tolist()
        names = ", ".join(f"{uids[row]}/{indices[row]}" for row in wrong[:NAMED])
        raise BatchError(
            f"{len(wrong)} of {len(batch)} samples differ from what the rollout sampled (hash "
            f"mismatch; uid/index: {names}{', …' if len(wrong) > NAMED else ''}): prompts, "
            "responses, token_versions, position_ids or response_mask were changed after "
            f"sampling. If a stage or hook changes tokens on purpose, let it also drop the "
            f"column {COLUMN!r}."
        )
    return {"training/num_hash_matched_samples": float(len(batch))}


def _rows(batch: DataProto, name: str, of_response: bool = True) -> Sequence[np.ndarray]:
    """Return the rows of a column without padding."""
    column = batch.column(name)
    if isinstance(column, RaggedTensor):
        return [row.numpy() for row in column.rows()]
    prompt_counts, response_counts = token_counts(batch)
    counts = (response_counts if of_response else prompt_counts).tolist()
    width = column.shape[1]
    spans = [slice(0, n) if of_response else slice(width - n, width) for n in counts]
    return [row[span].numpy() for row, span in zip(column, spans, strict=True)]


def _segments(batch: DataProto) -> list[list[int]]:
    """Return the positions in every response at which position ids restart at 0."""
    begins = batch.padded("position_ids")[:, -batch.column("responses").shape[-1] :] == 0
    begins &= torch.arange(begins.shape[1]) < token_counts(batch)[1][:, None]
    segments: list[list[int]] = [[] for _ in range(len(batch))]
    for row, place in begins.nonzero().tolist():
        segments[row].append(place)
    return segments


def _hash(
    prompt: np.ndarray,
    tokens: np.ndarray,
    versions: np.ndarray,
    segments: Sequence[int],
    images: Sequence[Sequence[Any]],
) -> int:
    digest = hashlib.blake2b(len(prompt).to_bytes(8, "little"), digest_size=8)
    for part in (prompt, tokens, versions, segments):
        digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    for _, sha, *_ in images:
        digest.update(bytes.fromhex(sha))
    return int.from_bytes(digest.digest(), "little", signed=True)
