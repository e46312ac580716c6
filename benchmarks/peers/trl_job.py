"""Run the job of `job.sh` on TRL; started by `trl_job.sh`. Writes a line for each step.

A step is defined as in the other frameworks: responses to a batch of prompts, and all updates on
them. TRL counts its optimizer steps, of which such a step has several.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from reward import reward_of_chats


def whole(number: int, parts: int, name: str) -> int:
    """Return the quotient; raise if the division leaves a remainder."""
    if number % parts:
        sys.exit(f"{name}: {number} is not a multiple of {parts}")
    return number // parts


def make_config(job: argparse.Namespace) -> tuple[Any, int]:
    """Return TRL's configuration, and the number of its optimizer steps per step."""
    from trl import GRPOConfig

    processes = job.gpus if job.device == "cuda" else 1
    per_pass = job.pass_samples * processes
    passes = whole(job.mini_batch * job.samples, per_pass, "samples of an update, of a pass")
    updates = whole(job.batch, job.mini_batch, "prompts of a step, of an update") * job.epochs
    engine: dict[str, Any] = {"use_cpu": True}
    if job.device == "cuda":
        engine = {
            "bf16": True,
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": True,
            "vllm_gpu_memory_utilization": job.engine_memory,
            "vllm_max_model_length": job.max_length,
        }
    config = GRPOConfig(
        output_dir=str(job.out / "run"),
        max_steps=job.steps * updates,
        per_device_train_batch_size=job.pass_samples,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes * (job.batch // job.mini_batch),
        num_iterations=job.epochs,
        num_generations=job.samples,
        max_completion_length=job.max_response,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="bnpo",
        temperature=1.0,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        seed=job.seed,
        **(engine if job.device == "cuda" else {"bf16": False, **engine}),
    )
    return config, updates


def make_clock(updates: int) -> Any:
    """Return a callback that times steps of `updates` optimizer steps each."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        seconds: list[float] = []

        def now(self) -> float:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                self.began = self.now()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                self.seconds.append(self.now() - self.began)

    return Clock()


def main() -> None:
    """Train, then write the steps from the clock and from TRL's log."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("batch", "mini-batch", "samples", "epochs", "steps", "max-response", "max-length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("pass-samples", "seed", "gpus"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("lr", "engine-memory"):
        parser.add_argument(f"--{name}", type=float, required=True)
    for name in ("model", "prompts"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    job = parser.parse_args()

    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    config, updates = make_config(job)
    clock = make_clock(updates)
    trainer = GRPOTrainer(
        model=job.model,
        reward_funcs=reward_of_chats,
        args=config,
        train_dataset=load_dataset("json", data_files=job.prompts, split="train"),
        processing_class=AutoTokenizer.from_pretrained(job.model, padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()

    if trainer.is_world_process_zero():
        log = trainer.state.log_history
        # over the responses of all processes, logged once per generation
        name = "completions/mean_length"
        tokens = [line[name] * job.batch * job.samples for line in log if name in line]
        lines = [
            json.dumps({"step": number, "seconds": taken, "response_tokens": drawn})
            for number, (taken, drawn) in enumerate(zip(clock.seconds, tokens, strict=True), 1)
        ]
        (job.out / "steps.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
