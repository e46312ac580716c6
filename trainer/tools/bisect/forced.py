"""B's steps on A's samples, computed by a replay of B: what differs besides the samples."""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.observers.saved_batches import RECORD
from trainer.tools.bisect.sides import OURS, Side, Step, recorded_side
from trainer.tools.replay.replay import Samples, replay
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.columns import read_column
from workers.rollout.sample import LENGTH_LIMIT, Sample, to_batch

LOG_PROBS = ("rollout_log_probs", "old_log_probs", "log_probs")
"""Fields that may have the sampler's log-probs; on-policy, those of the loss are equal to them."""


def with_samples_of(
    a: Side, b: Side, folder: Path, first: int, keep_in: Path | None = None
) -> tuple[Side, Side]:
    """Return both sides from step `first` on, in which B trains on A's samples and scores.

    The record of these steps is copied to the folder `keep_in`.
    """
    numbers = sorted(number for number in a.steps.keys() & b.steps.keys() if number >= first)
    samples: dict[int, Samples] = {}
    for number in numbers:
        step = Step.of(a, number)
        if b.framework != OURS or "scores" not in step.arrays or not step.ids("responses"):
            raise ConfigError(
                "--force: B must be a run folder of verl-like, and A must have recorded prompts, "
                f"responses and scores in step {number}."
            )
        samples[number] = partial(batch_with, step)
    sides: list[Side] = []

    def keep(run_folder: Path) -> None:
        if keep_in is not None:
            shutil.copytree(run_folder / RECORD, keep_in)
        repeated = recorded_side(b.name, run_folder / RECORD)
        arrays = {number: repeated.load(number) for number in repeated.steps}
        sides.append(replace(b, steps=repeated.steps, load=arrays.__getitem__))

    with contextlib.redirect_stdout(sys.stderr):
        replay(
            folder,
            numbers[-1],
            from_start=True,
            changes={"trainer.record": "all"},
            samples=samples,
            on_made=keep,
        )
    forced = sides[0]
    return replace(a, steps={n: a.steps[n] for n in forced.steps.keys() & a.steps.keys()}), forced


def batch_with(step: Step, trainer: Any, batch: DataProto) -> DataProto:
    """Return a generated batch with the samples and scores of a recorded step instead."""
    arrays, prompts, responses = step.arrays, step.ids("prompts"), step.ids("responses")
    if len(responses) != len(batch):
        raise ConfigError(f"--force: A has {len(responses)} samples in a step, B {len(batch)}.")
    version = int(read_column(batch, "policy_version").max())
    masks = arrays.get("response_mask", np.ones(arrays["responses"].shape))
    known = [arrays[name] for name in LOG_PROBS if name in arrays]
    log_probs = known[0] if known else 0.0 * masks
    truncated = arrays.get("truncated", np.zeros(len(batch)))
    uids = [str(group) for group in arrays.get("group", [row.tolist() for row in prompts])]
    indices = [uids[:row].count(uid) for row, uid in enumerate(uids)]
    samples = [
        Sample(
            prompts[row].tolist(),
            name=f"{uids[row]}/{indices[row]}",
            tokens=torch.tensor(tokens, dtype=torch.long),
            log_probs=torch.tensor(log_probs[row, : len(tokens)], dtype=torch.float32),
            versions=torch.tensor(masks[row, : len(tokens)] != 0).int() * (version + 1) - 1,
            finish_reason=LENGTH_LIMIT if truncated[row] else "stop",
        )
        for row, tokens in enumerate(responses)
    ]
    widths = max(map(len, prompts)), max(map(len, responses))
    pad = batch.meta_info["pad_token_id"]
    forced = to_batch(samples, widths, pad, version)
    scores = torch.zeros(len(samples), widths[1])
    last = torch.tensor([len(tokens) - 1 for tokens in responses])
    scores[torch.arange(len(samples)), last] = torch.tensor(arrays["scores"]).float()
    texts = trainer.rollouts.tokenizer.batch_decode(responses, skip_special_tokens=True)
    objects = {"uid": uids, "response_text": texts}
    forced = DataProto.from_dict(
        {**forced.columns, "sample_index": torch.tensor(indices), "token_level_scores": scores},
        {**batch.non_tensor_batch, **forced.non_tensor_batch, **objects},
        meta_info=batch.meta_info,
    )
    if "old_log_probs" in arrays:  # to compare them; without them, the update would compute its own
        log_probs_of_b = trainer.call("actor", "compute_log_prob", forced).batch()
        forced.set_columns({"old_log_probs": log_probs_of_b.column("old_log_probs")})
    return forced
