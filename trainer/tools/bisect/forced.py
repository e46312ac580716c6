"""B's step on A's samples, computed by a replay of B: what differs besides the samples."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.observers.recorded_steps import RECORD
from trainer.tools.bisect.sides import OURS, Side, recorded_side
from trainer.tools.bisect.walk import Step
from trainer.tools.replay.replay import replay
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.columns import read_column
from workers.rollout.batches import batch_of
from workers.rollout.sample import LENGTH_LIMIT, Sample


def with_samples_of(a: Side, b: Side, folder: Path, number: int) -> tuple[Side, Side]:
    """Return both sides with this step only, in which B trains on A's samples and scores."""
    step = Step.of(a, number)
    if b.framework != OURS or "scores" not in step.arrays or not step.ids("responses"):
        raise ConfigError(
            "--force: B must be a run folder of verl-like, and A must have recorded prompts, "
            f"responses and scores in step {number}."
        )
    sides: list[Side] = []

    def keep(run_folder: Path) -> None:
        repeated = recorded_side(b.name, run_folder / RECORD)
        arrays = repeated.load(number)
        sides.append(replace(b, steps={number: repeated.steps[number]}, load=lambda _: arrays))

    with contextlib.redirect_stdout(sys.stderr):
        replay(
            folder,
            number,
            from_start=True,
            changes={"trainer.record": "all"},
            samples=lambda trainer, batch: batch_with(step, trainer, batch),
            on_made=keep,
        )
    return replace(a, steps={number: a.steps[number]}), sides[0]


def batch_with(step: Step, trainer: Any, batch: DataProto) -> DataProto:
    """Return a generated batch with the samples and scores of a recorded step instead."""
    arrays, prompts, responses = step.arrays, step.ids("prompts"), step.ids("responses")
    assert prompts is not None, "the record has prompts"
    assert responses is not None, "the record has responses"
    if len(responses) != len(batch):
        raise ConfigError(f"--force: A has {len(responses)} samples in a step, B {len(batch)}.")
    version = int(read_column(batch, "policy_version").max())
    masks = arrays.get("response_mask", np.ones(arrays["responses"].shape))
    log_probs = arrays.get("rollout_log_probs", arrays.get("old_log_probs", 0.0 * masks))
    samples: list[Sample] = []
    uids: list[str] = []
    indices: list[int] = []
    for row, (prompt, tokens) in enumerate(zip(prompts, responses, strict=True)):
        uid = str(arrays["group"][row] if "group" in arrays else prompt.tolist())
        indices.append(uids.count(uid))
        uids.append(uid)
        end = len(tokens)
        samples.append(
            Sample(
                prompt.tolist(),
                name=f"{uid}/{indices[row]}",
                tokens=torch.tensor(tokens, dtype=torch.long),
                log_probs=torch.tensor(log_probs[row, :end], dtype=torch.float32),
                versions=torch.tensor(np.where(masks[row, :end], version, -1), dtype=torch.int32),
                finish_reason=LENGTH_LIMIT
                if arrays.get("truncated", masks[:, 0] < 0)[row]
                else "stop",
            )
        )
    widths = max(map(len, prompts)), max(map(len, responses))
    pad = batch.meta_info["pad_token_id"]
    forced = batch_of(samples, widths, pad, version)
    scores = torch.zeros(len(samples), widths[1])
    last = torch.tensor([len(tokens) - 1 for tokens in responses])
    scores[torch.arange(len(samples)), last] = torch.tensor(arrays["scores"]).float()
    texts = trainer.rollouts.tokenizer.batch_decode(responses, skip_special_tokens=True)
    objects = {"uid": uids, "response_text": texts}
    return DataProto.from_dict(
        {**forced.columns, "sample_index": torch.tensor(indices), "token_level_scores": scores},
        {**batch.non_tensor_batch, **forced.non_tensor_batch, **objects},
        meta_info=batch.meta_info,
    )
