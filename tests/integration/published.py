"""A published class on the whole road: GRPO, resume, SFT, export.

folder = write_published("gemma3", tiny_dir, tmp_path)
print(travel("gemma3", tiny_dir, tmp_path))     # "yes", or how `check` rejects the model
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.workers.models.architectures import build_tiny, tiny_model_config
from trainer.api.recipes import GRPO, SFT
from verl_like.errors import ConfigError
from workers.models.causal_lm import MODEL_ERRORS

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
PROMPTS = ["say a", "say b", "say ab", "say c"]


def write_published(case: str, tiny: Path, folder: Path) -> Any:
    """Write `folder`/model with `save_pretrained`, with the tiny tokenizer; return the module."""
    module = build_tiny(tiny_model_config(case))
    module.save_pretrained(folder / "model")
    for name in (*TOKENIZER, "chat_template.jinja"):
        if (tiny / "model" / name).is_file():
            shutil.copyfile(tiny / "model" / name, folder / "model" / name)
    return module


def grpo(folder: Path, engine: str = "hf") -> Any:
    """Return a GRPO run in this process, which checks the model when it starts."""
    return GRPO(
        folder / "model",
        PROMPTS,
        lambda response: float(len(response)),
        save_to=folder / "run",
        n=2,
        batch_size=4,
        max_prompt_length=16,
        max_response_length=8,
        logger=[],
        **{"actor_rollout_ref.rollout.name": engine, "trainer.save_freq": 1},
    )


def travel(case: str, tiny: Path, folder: Path) -> str:
    """Return "yes", or the sentence with which a run rejects the model before it starts."""
    module = write_published(case, tiny, folder)
    try:
        grpo(folder).fit(steps=2)
    except ConfigError as rejection:
        assert not list((folder / "run").glob("global_step_*")), "rejected after a step"
        return f"rejected: {rejection}"
    result = grpo(folder).fit(steps=1)
    assert result.metrics[-1]["training/global_step"] == 3, "the third step resumes the run"
    rows = [{"prompt": "say a", "response": "aaa"}] * 2
    SFT(folder / "model", rows, save_to=folder / "sft", batch_size=2, logger=[]).fit(steps=1)
    again = type(module).from_pretrained(result.model_folder, dtype=torch.float32)
    before, after = (set(part.state_dict()) for part in (module, again))
    assert before == after
    return "yes"


def crash_of(case: str, tiny: Path, folder: Path) -> str:
    """Return the result of `travel`, or the error if a run fails in another way."""
    try:
        return travel(case, tiny, folder)
    except (*MODEL_ERRORS, OSError) as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
