"""Rows of a batch as samples for an engine, and samples as columns of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.errors import RolloutError
from workers.columns import has_column, require
from workers.rollout.sample import Sample

REQUEST = "request"
"""The column that numbers the rows which are submitted, for whoever takes them."""
UNFINISHED = "abort"
RESPONSE = ("responses", "response_mask", "rollout_log_probs", "token_versions")
"""Columns of a response, which a row brings along that goes on."""
TRUNCATED = "rollout_truncated_log_probs"


def samples_of(
    data: DataProto, prompt_width: int, noise_of: Callable[[str, int], int]
) -> list[Sample]:
    """The real rows: prompts, or responses of an earlier call that are to go on.

    `noise_of` gives the key of a sample, by uid and sample index.
    """
    require(data, "input_ids", "attention_mask", "position_ids", "sample_index", "uid")
    prompts, masks, _ = prompt_columns(data)
    if prompts.shape[1] != prompt_width:
        raise RolloutError(
            f"rollout: prompts are {prompts.shape[1]} columns wide, data.max_prompt_length is "
            f"{prompt_width}; pad them to that width on the left (and do not generate a "
            "batch twice)."
        )
    indices, uids = data.batch["sample_index"].tolist(), data.non_tensor_batch["uid"]
    samples = []
    for row, mask in enumerate(masks[: data.num_real_rows].bool()):
        uid, index = str(uids[row]), indices[row]
        prompt = prompts[row][mask].tolist()
        samples.append(Sample(prompt, noise_of(uid, index), f"uid {uid} sample {index}"))
    return _with_responses(data, samples) if goes_on(data) else samples


def goes_on(data: DataProto) -> bool:
    """Whether these are rows of samples that are unfinished, not prompts."""
    return "finish_reason" in data.non_tensor_batch


def prompt_columns(data: DataProto) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and positions of the prompts."""
    columns = (data.batch[name] for name in ("input_ids", "attention_mask", "position_ids"))
    ids, mask, positions = columns
    if not goes_on(data):
        return ids, mask, positions
    require(data, "prompts")
    prompts = data.batch["prompts"]
    width = prompts.shape[1]
    return prompts, mask[:, :width], positions[:, :width]


def _with_responses(data: DataProto, prompts: Sequence[Sample]) -> list[Sample]:
    require(data, *RESPONSE)
    tokens, mask, log_probs, versions = (data.batch[name] for name in RESPONSE)
    kinds = [log_probs]
    if has_column(data, TRUNCATED):
        kinds.append(data.batch[TRUNCATED])
    stacked = torch.stack(kinds, dim=2)
    lengths = mask.sum(dim=1).tolist()
    return [
        sample.with_response(
            tokens[row, : lengths[row]],
            stacked[row, : lengths[row]],
            versions[row, : lengths[row]].to(torch.int32),
            str(data.non_tensor_batch["finish_reason"][row]),
        )
        for row, sample in enumerate(prompts)
    ]


def sample_columns(
    data: DataProto, samples: Sequence[Sample], width: int, pad: int, truncated: bool = False
) -> dict[str, Tensor]:
    """Columns of the rows with these responses; pad rows get an empty one."""
    prompts, prompt_mask, positions = prompt_columns(data)
    rows = len(prompts)
    responses = torch.full((rows, width), pad, dtype=torch.long)
    log_probs = torch.zeros((rows, width))
    optional = {TRUNCATED: torch.zeros((rows, width))} if truncated else {}
    versions = torch.zeros((rows, width), dtype=torch.int32)
    lengths = torch.zeros(rows, dtype=torch.long)

    for row, sample in enumerate(samples):
        lengths[row] = count = len(sample.tokens)
        responses[row, :count] = sample.tokens
        log_probs[row, :count] = sample.log_probs
        versions[row, :count] = sample.versions
        for column in optional.values():
            column[row, :count] = sample.truncated_log_probs

    columns = torch.arange(width)
    response_mask = (columns < lengths[:, None]).long()
    return {
        "prompts": prompts.clone(),
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
        "position_ids": torch.cat([positions, positions[:, -1:] + 1 + columns], dim=1),
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
        "token_versions": versions,
        **optional,
    }


def oldest_versions(samples: Sequence[Sample], rows: int, current: int) -> Tensor:
    """[rows]: the version of each response's oldest token; of an empty one the engine's own."""
    oldest = torch.full((rows,), current, dtype=torch.long)
    for row, sample in enumerate(samples):
        if len(sample.versions):
            oldest[row] = int(sample.versions.min())
    return oldest


def unfinished_rows(samples: DataProto) -> DataProto:
    """The rows whose responses are unfinished: generated again, they go on where they ended."""
    require(samples, "finish_reason", "prompts", "uid", "sample_index", *RESPONSE)
    is_open = torch.from_numpy(samples.non_tensor_batch["finish_reason"] == UNFINISHED)
    return samples.select_idxs(is_open)
