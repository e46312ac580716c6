"""Convert rows of prompts to samples for an engine, and samples to rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import Column, Ragged
from verl_like.errors import RolloutError
from workers.columns import require
from workers.models.routing import COLUMN as ROUTED
from workers.rollout.draws import draw_hash
from workers.rollout.sample import Sample

REQUEST = "request"
"""Column with the numbers of submitted rows, for the client that takes their samples."""
TRUNCATED = "rollout_truncated_log_probs"
NoiseOf = Callable[[str, int], int]
"""(uid, sample index) -> the key of the sample's noise."""


def samples_of(data: DataProto, prompt_width: int, noise_of: NoiseOf) -> list[Sample]:
    """Return samples without a response, one for each row that is not padding."""
    require(data, "input_ids", "attention_mask", "sample_index", "uid")
    ids = data.column("input_ids")
    if ids.shape[1] != prompt_width:
        raise RolloutError(
            f"rollout: prompts are {ids.shape[1]} columns wide, data.max_prompt_length is "
            f"{prompt_width}; pad them to that width on the left (and do not generate a "
            "batch twice)."
        )
    if isinstance(ids, Ragged):
        prompts = ids.rows()
    else:
        masks = data.padded("attention_mask") != 0
        prompts = [row[mask] for row, mask in zip(ids, masks, strict=True)]
    indices, uids = data.padded("sample_index").tolist(), data.non_tensor_batch["uid"]
    samples = []
    for row, prompt in enumerate(prompts[: data.num_real_rows]):
        uid, index = str(uids[row]), indices[row]
        samples.append(Sample(prompt.tolist(), noise_of(uid, index), f"uid {uid} sample {index}"))
    return samples


def batch_of(
    samples: Sequence[Sample],
    widths: tuple[int, int],
    pad: int,
    version: int,
    truncated: bool = False,
    no_choices: Tensor | None = None,
) -> DataProto:
    """Return rows with the prompts and responses of these samples; `widths` are those of both.

    `version` is the engine's version, for responses without sampled tokens. If `no_choices` (an
    empty tensor of expert choices) is given, the batch has a column of the choices for every token.
    """
    prompts = [torch.tensor(sample.prompt, dtype=torch.long) for sample in samples]
    responses = Ragged.from_rows([sample.tokens for sample in samples], widths[1], fill=pad)
    tokens = [
        torch.cat([prompt, sample.tokens]) for prompt, sample in zip(prompts, samples, strict=True)
    ]
    starts = widths[0] - torch.tensor([len(prompt) for prompt in prompts])
    lengths, values = torch.tensor([len(row) for row in tokens]), torch.cat(tokens)
    ids = Ragged(values, lengths, sum(widths), starts, pad)
    columns: dict[str, Column] = {
        "prompts": Ragged.from_rows(prompts, widths[0], at_end=True, fill=pad),
        "responses": responses,
        "input_ids": ids,
        "attention_mask": ids.with_values(torch.ones_like(values)),
        "position_ids": ids.with_values(torch.cat([_positions(sample) for sample in samples])),
        "response_mask": responses.with_values(torch.cat([s.is_drawn for s in samples]).long()),
        "rollout_log_probs": responses.with_values(torch.cat([s.log_probs for s in samples])),
        "token_versions": responses.with_values(torch.cat([s.versions for s in samples])),
        "policy_version": torch.tensor([_oldest_version(s, version) for s in samples]),
        "draw_hash": torch.tensor([draw_hash(sample) for sample in samples]),
    }
    if truncated:
        sampled_log_probs_column = [sample.truncated_log_probs for sample in samples]
        known = [log_probs for log_probs in sampled_log_probs_column if log_probs is not None]
        columns[TRUNCATED] = responses.with_values(torch.cat([torch.empty(0), *known]))
    if no_choices is not None:
        chosen = [_choices(sample, no_choices) for sample in samples]
        columns[ROUTED] = ids.with_values(torch.cat([no_choices, *chosen]))
    return DataProto.from_dict(columns, {"finish_reason": [s.finish_reason for s in samples]})


def _positions(sample: Sample) -> Tensor:
    """Return positions of the prompt and the response; each segment begins at 0."""
    begins = [0, *(len(sample.prompt) + begin for begin in sample.segments)]
    ends = [*begins[1:], len(sample.prompt) + len(sample.tokens)]
    return torch.cat([torch.arange(end - begin) for begin, end in zip(begins, ends, strict=True)])


def _choices(sample: Sample, no_choices: Tensor) -> Tensor:
    """Return [tokens, layers, choices], the prompt's tokens first.

    Tokens that the engine has not read, such as the last one, have zeros.
    """
    chosen = no_choices if sample.routed_experts is None else sample.routed_experts
    drawn = sample.is_drawn.nonzero().flatten()
    needed = len(sample.prompt) + int(drawn[-1]) if len(drawn) else 0
    if len(chosen) < needed:
        raise RolloutError(
            f"rollout: of {sample.name} the experts of {len(chosen)} tokens are known, and its "
            f"last token was drawn after {needed}."
        )
    length = len(sample.prompt) + len(sample.tokens)
    return torch.cat([chosen, chosen.new_zeros(length - len(chosen), *chosen.shape[1:])])


def _oldest_version(sample: Sample, current: int) -> int:
    """Return the version of the oldest sampled token, or the current version."""
    drawn = sample.versions[sample.is_drawn]
    return int(drawn.min()) if len(drawn) else current
