"""The teacher computes log-probs with the model in its folder, without LoRA."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.workers.samples import PROMPT, make_batch, started, tiny_config
from workers.config import teacher_model
from workers.roles.reference import TeacherWorker


def test_log_probs_are_the_teacher_model_s_at_the_rollout_s_temperature(tiny_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(tiny_dir)
    config.distillation.teacher_model.model_path = str(tiny_dir / "model")
    config.actor_rollout_ref.rollout.temperature = 0.7
    batch = make_batch(5)
    found = started(TeacherWorker, config).compute_teacher_log_prob(batch)

    model = AutoModelForCausalLM.from_pretrained(tiny_dir / "model").double()
    columns = batch.batch
    with torch.no_grad():
        logits = model(
            input_ids=columns["input_ids"],
            attention_mask=columns["attention_mask"],
            position_ids=columns["position_ids"],
        ).logits
    log_probs = (logits[:, PROMPT - 1 : -1] / 0.7).log_softmax(dim=-1)
    expected = log_probs.gather(-1, columns["responses"][..., None]).squeeze(-1)
    inside = columns["response_mask"].bool()
    torch.testing.assert_close(
        found.batch["teacher_log_prob"][inside].double(), expected[inside], rtol=1e-4, atol=1e-5
    )


def test_the_teacher_has_no_adapters_of_the_student(tiny_dir: Path) -> None:
    config = tiny_config(tiny_dir)
    config.actor_rollout_ref.model.lora_rank = 4
    config.distillation.teacher_model.model_path = "teacher"
    model = teacher_model(config)
    assert (model.path, model.lora_rank) == ("teacher", 0)
