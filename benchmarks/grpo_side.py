"""One side of the GRPO comparison, in a separate process; `bench_ppo.py` runs both sides.

It prints JSON. The arguments of `python benchmarks/grpo_side.py` are:

    make FOLDER                                  write model and prompts for both sides
    ours|compiled|trl FOLDER fixed|tailed STEPS [SEED]    mean reward of every step

`compiled` is our side with `model.compile=on`.

`fixed`: every response has 32 tokens, because the model cannot generate its end token. `tailed`: a
random model ends a response with the same probability after every token, so lengths have a long
tail of up to 256 tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from sides import MODEL, tokenizer_of_model

NUM_PROMPTS, NUM_SAMPLES, LEARNING_RATE = 64, 4, 1e-3
NUM_THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
"""Number of threads with which either side computes."""
WIDTHS = {"fixed": 32, "tailed": 256}


def make(folder: Path) -> None:
    """Write two model folders that differ in their eos token, and prompts as parquet and JSONL."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from trainer.cli.make_tiny import make_rows

    for kind in WIDTHS:
        tokenizer = tokenizer_of_model()
        if kind == "fixed":
            tokenizer.add_special_tokens({"eos_token": "<never>"})

        torch.manual_seed(0)
        config = Qwen2Config(
            **MODEL,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=None if kind == "fixed" else tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

        tokenizer.save_pretrained(folder / kind)
        Qwen2ForCausalLM(config).save_pretrained(folder / kind)

    rows = make_rows(40 * NUM_PROMPTS, "train")
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    lines = [
        json.dumps({"prompt": row["prompt"], "letter": row["reward_model"]["ground_truth"]})
        for row in rows
    ]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")


def ours(
    folder: Path, kind: str, steps: int, seed: int = 1, compiles: str = "auto", *more: str
) -> list[float]:
    """Run `backend=local` as the command line does, with more overrides; return the rewards."""
    from trainer import load_config, run
    from verl_like.process.info import OWN_PROCESS

    os.environ.setdefault(OWN_PROCESS, "1")
    with tempfile.TemporaryDirectory() as run_folder:
        overrides = [
            "trainer.backend=local",
            "trainer.n_gpus_per_node=1",
            "trainer.device=cpu",
            "trainer.logger=[]",
            f"trainer.threads_per_process={NUM_THREADS}",
            f"actor_rollout_ref.model.path={folder / kind}",
            f"actor_rollout_ref.model.compile={compiles}",
            f"data.train_files={folder}/train.parquet",
            f"data.train_batch_size={NUM_PROMPTS}",
            "data.max_prompt_length=16",
            f"data.max_response_length={WIDTHS[kind]}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
            f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
            f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
            "algorithm.adv_estimator=grpo",
            f"trainer.total_training_steps={steps}",
            f"trainer.seed={seed}",
            f"trainer.default_local_dir={run_folder}",
            *more,
        ]
        run(load_config(overrides))
        lines = (Path(run_folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["critic/score/mean"] for line in lines]


def share_of_letter(completions: list[Any], letter: list[str], **_: Any) -> list[float]:
    """Return the reward of examples/tiny: the fraction of characters that are the letter."""
    texts = [completion[0]["content"] for completion in completions]
    pairs = zip(texts, letter, strict=True)
    return [text.count(wanted) / max(len(text), 1) for text, wanted in pairs]


def trl_trainer(folder: Path, kind: str, steps: int, seed: int, run_folder: str) -> Any:
    """Return TRL's trainer in its fastest form: one generation and one pass for the whole batch."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=run_folder,
        max_steps=steps,
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        max_completion_length=WIDTHS[kind],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="bnpo",
        temperature=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=seed,
    )

    return GRPOTrainer(
        model=str(folder / kind),
        reward_funcs=share_of_letter,
        args=config,
        train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / kind, padding_side="left"),
    )


def trl(folder: Path, kind: str, steps: int, seed: int = 1) -> list[float]:
    """Return the rewards that TRL logs."""
    with tempfile.TemporaryDirectory() as run_folder:
        trainer = trl_trainer(folder, kind, steps, seed, run_folder)
        trainer.train()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def main() -> None:
    """Parse the command line, and run the benchmark."""
    import torch

    torch.set_num_threads(NUM_THREADS)
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "make":
        folder.mkdir(parents=True, exist_ok=True)
        make(folder)
        return
    compiled = partial(ours, compiles="on")
    side: Any = {"ours": ours, "compiled": compiled, "trl": trl}[command]
    print(json.dumps(side(folder, sys.argv[3], *map(int, sys.argv[4:]))))


if __name__ == "__main__":
    main()
