"""The column vLLM of `docs/models.md`: vLLM's CPU engine samples with a published class.

    print(try_vllm("llama", folder))        # "yes", or "rejected: ..."

Heads have at least 32 numbers, which vLLM needs on CPUs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.models.walk import decoding_error
from verl_like.errors import ConfigError
from workers.models.state import named_state
from workers.rollout.base import EngineLimits
from workers.rollout.vllm.setup import VllmSettings

LARGEST_ERROR = 1e-4
"""Bound of the error of log-probs and greedy tokens."""


def try_vllm(case: str, folder: Path) -> str:
    """Return "yes" if tokens and log-probs are those of transformers, "no", or a rejection."""
    from workers.rollout.vllm.engine import VllmRolloutEngine

    module = build_tiny(tiny_model_config(case, scale=4))
    module.save_pretrained(folder)
    limits = EngineLimits(32, 64, max_num_seqs=4, kv_cache_gib=1.0)
    try:
        engine = VllmRolloutEngine(VllmSettings(str(folder)), limits)
    except ConfigError as rejection:
        return f"rejected: {rejection}"
    engine.load_weights(named_state(module))
    engine.commit(0)
    error = decoding_error(engine, module, num_prompts=2)
    engine.close()
    return "yes" if error < LARGEST_ERROR else f"no: off by {error:.0e}"


def main(case: str) -> None:
    """Print "yes", "no" or "rejected"."""
    with tempfile.TemporaryDirectory() as folder:
        print(try_vllm(case, Path(folder)).partition(":")[0])
