"""The callback records TRL 1.16's own trainers, and `bisect` names the argument that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.tools.check_loss.stand_ins import NOT_INSTALLED
from trainer.cli.bisect import bisect

trl = pytest.importorskip("trl", reason=NOT_INSTALLED)

ARGUMENTS = {
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_steps": 2,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
SAMPLING = {"num_generations": 4, "max_completion_length": 6, "loss_type": "bnpo"}
DIFFERENCES = {
    "GRPO": ("scale_rewards", ("group", "none"), "advantages"),
    "RLOO": ("num_generations", (4, 2), "prompts"),
    "SFT": ("weight_decay", (0.0, 0.5), "optimizer"),
    "DPO": ("beta", (0.1, 0.2), "loss"),  # of step 2: clipped gradients, and Adam's first step
}
"""Trainer -> an argument, its values on both sides, and the first stage that differs."""


def rows_for(trainer: str) -> list[dict[str, Any]]:
    """Return 32 rows of texts for a trainer."""
    rows = []
    for number in [*range(8)] * 4:
        prompt = [{"role": "user", "content": "ab"[number % 2] * (number + 1)}]
        answers = [[{"role": "assistant", "content": text}] for text in ("abc", "b")]
        if trainer == "SFT":
            rows.append({"prompt": prompt, "completion": answers[0]})
        elif trainer == "DPO":
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        else:
            rows.append({"prompt": prompt})
    return rows


def record(trainer: str, model: Path, folder: Path, **arguments: Any) -> None:
    """Train with TRL's trainer, and record it."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from trainer.tools.bisect.trl_callback import RecordCallback

    further: dict[str, Any] = {}
    if trainer in ("GRPO", "RLOO"):
        arguments = SAMPLING | arguments
        further["reward_funcs"] = lambda completions, **_: [
            float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions
        ]
    if trainer == "RLOO":
        del arguments["loss_type"]
    trainer_of_trl = getattr(trl, f"{trainer}Trainer")(
        model=str(model),
        args=getattr(trl, f"{trainer}Config")(
            output_dir=str(folder / "out"), **(ARGUMENTS | arguments)
        ),
        train_dataset=Dataset.from_list(rows_for(trainer)),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        **further,
    )
    trainer_of_trl.add_callback(RecordCallback(trainer_of_trl, str(folder / "record")))
    trainer_of_trl.train()


@pytest.mark.parametrize("trainer", DIFFERENCES)
def test_the_argument_that_differs_is_named(trainer: str, tiny_dir: Path, tmp_path: Path) -> None:
    name, values, stage = DIFFERENCES[trainer]
    for side, value in zip("ab", values, strict=True):
        record(trainer, tiny_dir / "model", tmp_path / side, **{name: value})
    record(trainer, tiny_dir / "model", tmp_path / "again", **{name: values[0]})

    def between(first: str, other: str) -> Any:
        return bisect(*(f"trl:{tmp_path / side / 'record'}" for side in (first, other)))

    assert between("a", "again").verdict == "equal"
    finding = between("a", "b")
    assert (finding.verdict, finding.stage) == ("differs", stage)
    assert any(name in cause["setting"] for cause in finding.causes)
