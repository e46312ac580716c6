"""Log-probs of recorded tokens under the first model: they name temperature and precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.tools.bisect.walk import Step, on_tokens

Cause = dict[str, str]
MOST_ROWS = 64
TEMPERATURES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 1.1, 1.2, 1.5, 2.0)
KEY = "actor_rollout_ref.rollout.temperature"
LARGEST_ERROR = 1e-3


def of_log_probs(steps: tuple[Step, Step]) -> Iterator[Cause]:
    """Yield the temperature and precision of both sides' log-probs, if they differ.

    The recorded step must be the first, because later weights are not recorded.
    """
    if steps[0].number != 1:
        return
    computed = [described(step) for step in steps]
    if None not in computed and computed[0] != computed[1]:
        (x, setting), (y, other) = computed  # type: ignore[misc]
        yield {
            "probe": "temperature and precision of log-probs",
            "sentence": f"A's log-probs are {x}, B's {y}",
            "setting": f"{setting} | {other}",
        }


def described(step: Step) -> tuple[str, str] | None:
    """Return how the log-probs were computed, in words and as a setting."""
    names = ("rollout_log_probs", "old_log_probs", "log_probs")
    recorded = next((step.arrays[name] for name in names if name in step.arrays), None)
    prompts, responses = step.ids("prompts"), step.ids("responses")
    if recorded is None or not prompts or not responses:
        return None
    rows = [n for n, row in enumerate(responses) if len(row)][:MOST_ROWS]
    expected = on_tokens(recorded, step, recorded.shape[1])
    known = np.concatenate([expected[n, : len(responses[n])] for n in rows])
    configured = step.side.setting(KEY, "temperature")
    temperatures = dict.fromkeys((float(configured or 1.0) or 1.0, *TEMPERATURES))
    best: tuple[float, str, str] | None = None
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(step, [prompts[n] for n in rows], [responses[n] for n in rows], dtype)
        if logits is None:
            return None
        ids = torch.from_numpy(np.concatenate([responses[n] for n in rows]).astype(np.int64))
        for temperature in temperatures:
            picked = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
            error = float(np.abs(picked.double().numpy() - known).max())
            words = f"at temperature {temperature:g} in {str(dtype).removeprefix('torch.')}"
            if best is None or error < best[0]:
                best = error, words, f"{KEY}={temperature:g}"
    if best is None or best[0] > LARGEST_ERROR:
        return None
    return best[1], best[2]


def logits_of(
    step: Step, prompts: list[np.ndarray], responses: list[np.ndarray], dtype: Any
) -> Tensor | None:
    """Return the logits [tokens, vocabulary] of all responses, or None if the model is not here."""
    from transformers import AutoModelForCausalLM

    try:
        path = step.side.model_path
        loaded = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype)
    except (OSError, ValueError):
        return None
    parts = []
    with torch.no_grad():
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
            if int(ids.max()) >= loaded.config.vocab_size or int(ids.min()) < 0:
                return None
            parts.append(loaded(ids[None]).logits[0, len(prompt) - 1 : -1].float())
    return torch.cat(parts)
