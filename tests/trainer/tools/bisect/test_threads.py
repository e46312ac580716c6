"""Public questions about differing curves, rebuilt at tiny size: docs/my_curves_differ.md.

Each section of the page shows the output of `verl-like bisect a b` for two records made here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.tools.bisect.pairs import computed, samples
from trainer.cli.bisect import bisect, text_of
from trainer.ppo.advantages.estimators import whiten_
from verl_like.record import Recorder

PAGE = Path(__file__).parents[4] / "docs" / "my_curves_differ.md"
Steps = list[dict[str, Any]]


def steps_of(**settings: Any) -> Steps:
    """Return two steps; a step has `arrays`, and its numbers."""
    return [computed("verl-like", samples(seed), settings) for seed in (1, 2)]


def openrlhf_s_rloo() -> tuple[Steps, Steps]:
    """OpenRLHF normalizes RLOO's advantages over all tokens of the batch afterwards."""
    theirs = steps_of(adv_estimator="rloo")
    for step in theirs:
        arrays = step["arrays"]
        mask = torch.tensor(arrays["response_mask"]).float()
        arrays["advantages"] = whiten_(arrays["advantages"].clone(), mask)
    return theirs, steps_of(adv_estimator="rloo")


def dropout() -> tuple[Steps, Steps]:
    """The same on-policy loss, whose log-probs and gradients are under dropout in B."""
    sides = steps_of(), steps_of()
    for side, steps in enumerate(sides):
        for step in steps:
            arrays = step["arrays"]
            inside = arrays["response_mask"] != 0
            noise = np.random.default_rng(3).normal(scale=0.3, size=inside.shape) * side
            arrays["log_probs"] = ((arrays["old_log_probs"] + noise) * inside).astype(np.float32)
            mean = float((-arrays["advantages"].numpy() * inside).sum() / inside.sum())
            step |= {"pg_loss": mean, "loss": mean, "grad_norm": 0.41 + 0.2 * side}
    return sides


def log_probs_of_the_sampler() -> tuple[Steps, Steps]:
    """B takes the sampler's log-probs as old log-probs; they differ by its kernels' rounding."""
    sides = steps_of(), steps_of()
    for step in (*sides[0], *sides[1]):
        arrays = step["arrays"]
        noise = np.random.default_rng(4).normal(scale=0.01, size=arrays["old_log_probs"].shape)
        of_sampler = (arrays["old_log_probs"] + noise) * arrays["response_mask"]
        arrays["rollout_log_probs"] = of_sampler.astype(np.float32)
    for step in sides[1]:
        step["arrays"]["old_log_probs"] = step["arrays"]["rollout_log_probs"]
    return sides


def interleaved_groups() -> tuple[Steps, Steps]:
    """B repeats the list of prompts, but takes neighbors as the samples of a prompt."""
    sides = []
    for is_wrong in (False, True):
        steps = []
        for seed in (1, 2):
            arrays = samples(seed)
            order = np.arange(24).reshape(6, 4).T.ravel()
            arrays = {name: array[order] for name, array in arrays.items()}
            group = arrays["group"]
            step = computed(
                "verl-like", arrays | ({"group": np.arange(24) // 4} if is_wrong else {}), {}
            )
            step["arrays"]["group"] = group
            steps.append(step)
        sides.append(steps)
    return sides[0], sides[1]


def colliding_seeds() -> tuple[Steps, Steps]:
    """In B, two samples of each prompt have one seed, so they are equal."""
    sides = steps_of(), steps_of()
    for step in sides[1]:
        for name in ("responses", "response_mask", "response_lengths"):
            array = step["arrays"][name]
            array[1::2] = array[::2]
    return sides


def bfloat16_weights() -> tuple[Steps, Steps]:
    """B has bfloat16 weights, so its log-probs are rounded."""
    sides = steps_of(), steps_of()
    for step in sides[1]:
        old = torch.tensor(step["arrays"]["old_log_probs"])
        step["arrays"]["old_log_probs"] = old.bfloat16().float().numpy()
    return sides


THREADS: dict[str, tuple[Callable[[], tuple[Steps, Steps]], tuple[str, str]]] = {
    "verl#5355": (openrlhf_s_rloo, ("openrlhf", "verl")),
    "verl#550": (dropout, ("verl", "verl")),
    "Trinity-RFT#426": (log_probs_of_the_sampler, ("verl", "trinity")),
    "prime-rl#600": (interleaved_groups, ("mine", "prime-rl")),
    "verl-omni#561": (colliding_seeds, ("verl", "verl")),
    "verl#4438": (bfloat16_weights, ("easyr1", "verl")),
}


def answer(folder: Path, thread: str) -> str:
    """Return the stage of the first difference and the causes that the command prints."""
    make, frameworks = THREADS[thread]
    names = [str(folder / side) for side in "ab"]
    for name, framework, steps in zip(names, frameworks, make(), strict=True):
        recorder = Recorder(name, framework)
        for number, step in enumerate(steps, 1):
            recorder.step(number, **step)
    lines = text_of(bisect(*names), *names).splitlines()
    text = "\n".join(line for line in lines[2:] if not line.startswith("  "))
    return re.sub(r"(first difference: step 1, [\w -]+): .*", r"\1", text)


@pytest.mark.parametrize("thread", THREADS)
def test_the_page_shows_what_the_command_prints(tmp_path: Path, thread: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = page.split(f"### {thread}: ")[1].split("\n### ")[0]
    assert section.split("```text\n")[1].split("\n```")[0] == answer(tmp_path, thread)
