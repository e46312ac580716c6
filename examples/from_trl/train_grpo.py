"""GRPO with TRL, as its users write it; the last lines record it for `verl-like`.

PYTHONPATH=path/to/verl-like python train_grpo.py MODEL OUT [STEPS]
"""

import random
import sys

from datasets import Dataset
from rewards import close_number, short
from trl import GRPOConfig, GRPOTrainer


def sums(count: int) -> Dataset:
    """Return chats that ask for the sum of two numbers."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        a, b = rng.randrange(2, 60), rng.randrange(2, 60)
        text = f"What is {a} + {b}? Answer with the number only."
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": str(a + b)})
    return Dataset.from_list(rows)


if __name__ == "__main__":
    model, out, *steps = sys.argv[1:]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[close_number, short],
        args=GRPOConfig(
            output_dir=f"{out}/checkpoints",
            learning_rate=1e-5,
            lr_scheduler_type="cosine",
            warmup_steps=4,
            weight_decay=0.1,
            max_grad_norm=0.5,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=24,
            beta=0.04,
            max_steps=int(steps[0]) if steps else 20,
            logging_steps=1,
            save_strategy="no",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
        ),
        train_dataset=sums(256),
    )

    from verl_like.extend import RecordCallback

    trainer.train_dataset.to_parquet("rows.parquet")
    trainer.add_callback(RecordCallback(trainer, f"{out}/record"))
    trainer.train()
