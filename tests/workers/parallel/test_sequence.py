"""Attention of a packed row with tokens on several ranks, against one rank with all tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.workers.kept_ranks import run_kept
from verl_like.process.worker import Worker
from workers.parallel.sequence import SequenceRanks
from workers.training.passes.attention import LocalMask, RowLayout, packed_attention

CPU = torch.device("cpu")
LENGTHS = (7, 30, 3, 1, 24)
MAX_TOKENS = 72
HEADS = {
    "divide": (4, 4, 4),
    "grouped": (4, 2, 2),
    "one of keys": (4, 1, 1),
    "of keys do not divide": (12, 3, 3),
    "outnumbered": (1, 1, 1),
    "two, fewer than ranks": (2, 1, 1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scaling": 0.3},
    "window": {"attention_mask": LocalMask(window=5)},
    "chunk": {"attention_mask": LocalMask(chunk=6)},
    "soft cap": {"softcap": 0.8},
    "soft cap in a window": {"softcap": 0.8, "attention_mask": LocalMask(window=5)},
    "sinks": {"s_aux": True},
}


def attended(
    heads: tuple[int, int, int], options: dict[str, Any], ranks: SequenceRanks | None
) -> list[torch.Tensor]:
    """Return output and gradients of this rank's tokens, and a share of the sinks' gradient."""
    generator = torch.Generator().manual_seed(0)
    num_real = sum(LENGTHS)
    num_tokens = num_real if ranks is None else ranks.padded(num_real)
    places = torch.arange(num_real)
    if ranks is not None:
        places = ranks.places(num_tokens)[dist.get_rank()]

    sizes = (8, 8, 6)  # values need not be as large as keys
    draws = [
        torch.randn(MAX_TOKENS, *shape, generator=generator)
        for shape in zip((heads[0], *heads), (6, *sizes), strict=True)
    ]
    weights, *states = (draw[places] for draw in draws)
    leaves = [state.requires_grad_() for state in states]
    settings = {"attention_mask": None, **options}
    if "s_aux" in options:
        settings["s_aux"] = torch.randn(heads[0], generator=generator).requires_grad_()
        leaves.append(settings["s_aux"])

    padding = [num_tokens - num_real] if num_tokens > num_real else []
    layout = RowLayout([*LENGTHS, *padding], CPU, ranks)
    q, k, v = (state.transpose(0, 1)[None] for state in states)
    output, _ = packed_attention(None, q, k, v, row_layout=layout, **settings)
    weights = weights * (places < num_real)[:, None, None]
    gradients = torch.autograd.grad((output[0].sin() * weights).sum(), leaves)
    return [output[0].detach(), *gradients, places]


Results = dict[tuple[str, str], list[torch.Tensor]]


def all_cases(ranks: SequenceRanks | None) -> Results:
    results: Results = {}
    for heads, options in itertools.product(HEADS, OPTIONS):
        if ranks is not None:
            ranks = replace(ranks, num_heads=HEADS[heads][0])
        results[heads, options] = attended(HEADS[heads], OPTIONS[options], ranks)
    return results


def on_ranks() -> Results:
    Worker().open_process_group()
    assert dist.group.WORLD is not None
    return all_cases(SequenceRanks(dist.group.WORLD, 1))


def test_attention_over_ranks_matches_one_rank() -> None:
    results = run_kept(4, on_ranks)
    for case, (*one_rank, _) in all_cases(None).items():
        order = torch.cat([result[case][-1] for result in results]).argsort()[: sum(LENGTHS)]
        for number, expected in enumerate(one_rank):
            of_ranks = [result[case][number] for result in results]
            of_sinks = number == 4
            ours = torch.stack(of_ranks).sum(0) if of_sinks else torch.cat(of_ranks)[order]
            error = (ours - expected).norm() / expected.norm()
            assert error < 1e-6, (case, number)
