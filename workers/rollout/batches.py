"""Rows of a batch as samples for an engine, and samples as columns of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import Column, Ragged, rectangle_of
from verl_like.errors import RolloutError
from workers.columns import has_column, require, token_counts
from workers.models.routing import COLUMN as ROUTED
from workers.rollout.sample import Sample

REQUEST = "request"
"""The column that numbers the rows which are submitted, for whoever takes them."""
RESPONSE = ("responses", "response_mask", "rollout_log_probs", "token_versions")
"""Columns of a response, which a row brings along that goes on."""
TRUNCATED = "rollout_truncated_log_probs"
NoiseOf = Callable[[str, int], int]
"""The key of a sample's noise, by uid and sample index."""


def samples_of(data: DataProto, prompt_width: int, noise_of: NoiseOf) -> list[Sample]:
    """The real rows: prompts, or responses of an earlier call that are to go on."""
    require(data, "input_ids", "attention_mask", "position_ids", "sample_index", "uid")
    prompts, _, width = prompt_rows(data)
    if width != prompt_width:
        raise RolloutError(
            f"rollout: prompts are {width} columns wide, data.max_prompt_length is "
            f"{prompt_width}; pad them to that width on the left (and do not generate a "
            "batch twice)."
        )
    indices, uids = data.padded("sample_index").tolist(), data.non_tensor_batch["uid"]
    samples = []
    for row, prompt in enumerate(prompts[: data.num_real_rows]):
        uid, index = str(uids[row]), indices[row]
        samples.append(Sample(prompt.tolist(), noise_of(uid, index), f"uid {uid} sample {index}"))
    return _with_responses(data, samples) if goes_on(data) else samples


def goes_on(data: DataProto) -> bool:
    """Whether these are rows of samples that are unfinished, not prompts."""
    return "finish_reason" in data.non_tensor_batch


def prompt_rows(data: DataProto) -> tuple[list[Tensor], list[Tensor], int]:
    """Ids and positions of every prompt without padding, and the width of the prompts' column."""
    name = "input_ids"
    if goes_on(data):
        name = "prompts"
        require(data, name)
    ids, positions = data.column(name), data.column("position_ids")
    width = ids.shape[1]
    if isinstance(ids, Ragged) and isinstance(positions, Ragged):
        rows = list(ids.rows())
        pairs = zip(rows, positions.rows(), strict=True)
        return rows, [places[: len(row)] for row, places in pairs], width

    masks = data.padded("attention_mask")[:, :width] != 0
    both = (rectangle_of(column)[:, :width] for column in (ids, positions))
    found = [[row[mask] for row, mask in zip(column, masks, strict=True)] for column in both]
    return found[0], found[1], width


def _with_responses(data: DataProto, prompts: Sequence[Sample]) -> list[Sample]:
    require(data, *RESPONSE)
    tokens, _, log_probs, versions = (_response_rows(data, name) for name in RESPONSE)
    kinds = [log_probs]
    if has_column(data, TRUNCATED):
        kinds.append(_response_rows(data, TRUNCATED))
    return [
        sample.with_response(
            tokens[row],
            torch.stack([kind[row] for kind in kinds], dim=1),
            versions[row].to(torch.int32),
            str(data.non_tensor_batch["finish_reason"][row]),
        )
        for row, sample in enumerate(prompts)
    ]


def _response_rows(data: DataProto, name: str) -> Sequence[Tensor]:
    """A column of responses, row by row without padding."""
    column = data.column(name)
    if isinstance(column, Ragged):
        return column.rows()
    _, lengths = token_counts(data)
    return [row[:length] for row, length in zip(column, lengths.tolist(), strict=True)]


def sample_columns(
    data: DataProto,
    samples: Sequence[Sample],
    width: int,
    pad: int,
    truncated: bool = False,
    no_choices: Tensor | None = None,
) -> dict[str, Column]:
    """Columns of the rows with these responses; pad rows get an empty one.

    With `no_choices`, what was chosen of experts for no token, there is a column of them.
    """
    prompts, prompt_positions, prompt_width = prompt_rows(data)
    made = [*samples, *[Sample([])] * (len(prompts) - len(samples))]
    responses = Ragged.of_rows([sample.tokens for sample in made], width, fill=pad)
    versions = torch.cat([sample.versions for sample in made])

    tokens, positions = [], []
    for prompt, places, sample in zip(prompts, prompt_positions, made, strict=True):
        tokens.append(torch.cat([prompt, sample.tokens]))
        positions.append(torch.cat([places, places[-1:] + 1 + torch.arange(len(sample.tokens))]))
        for begin in sample.segments:
            positions[-1][len(prompt) + begin :] = torch.arange(len(sample.tokens) - begin)
    lengths, values = torch.tensor([len(row) for row in tokens]), torch.cat(tokens)
    starts = prompt_width - torch.tensor([len(prompt) for prompt in prompts])
    ids = Ragged(values, lengths, prompt_width + width, starts, pad)

    columns: dict[str, Column] = {
        "prompts": Ragged.of_rows(prompts, prompt_width, at_end=True, fill=pad),
        "responses": responses,
        "input_ids": ids,
        "attention_mask": ids.with_values(torch.ones_like(values)),
        "position_ids": ids.with_values(torch.cat(positions)),
        "response_mask": responses.with_values((versions >= 0).long()),
        "rollout_log_probs": responses.with_values(torch.cat([s.log_probs for s in made])),
        "token_versions": responses.with_values(versions),
    }
    if truncated:
        of_drawn = [sample.truncated_log_probs for sample in samples]
        found = [log_probs for log_probs in of_drawn if log_probs is not None]
        columns[TRUNCATED] = responses.with_values(torch.cat([torch.empty(0), *found]))
    if no_choices is not None:
        chosen = [_choices(*row, no_choices) for row in zip(made, tokens, strict=True)]
        columns[ROUTED] = ids.with_values(torch.cat([no_choices, *chosen]))
    return columns


def _choices(sample: Sample, tokens: Tensor, no_choices: Tensor) -> Tensor:
    """[tokens, layers, choices]; zeros for those that the engine has not read, such as the last."""
    chosen = no_choices if sample.routed_experts is None else sample.routed_experts
    drawn = (sample.versions >= 0).nonzero().flatten()
    needed = len(sample.prompt) + int(drawn[-1]) if len(drawn) else 0
    if len(chosen) < needed and sample.finish_reason != "abort":
        raise RolloutError(
            f"rollout: of {sample.name} the experts of {len(chosen)} tokens are known, and its "
            f"last token was drawn after {needed}."
        )
    return torch.cat([chosen, chosen.new_zeros(len(tokens) - len(chosen), *chosen.shape[1:])])


def oldest_versions(samples: Sequence[Sample], rows: int, current: int) -> Tensor:
    """[rows]: the version of each response's oldest drawn token; without any the engine's own."""
    oldest = torch.full((rows,), current, dtype=torch.long)
    for row, sample in enumerate(samples):
        drawn = sample.versions[sample.versions >= 0]
        if len(drawn):
            oldest[row] = int(drawn.min())
    return oldest
