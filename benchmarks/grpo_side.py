"""One side of the GRPO comparison, in a separate process; `bench_ppo.py` runs both sides.

It prints JSON. The arguments of `python benchmarks/grpo_side.py` are:

    make FOLDER                                  write model and prompts for both sides
    ours|compiled|trl FOLDER fixed|tailed STEPS [SEED]    mean reward of every step
    replay FOLDER fixed|tailed STEPS             distance of TRL's weights from ours

`compiled` is our side with `model.compile=on`. `replay` passes the samples of our run to TRL's loss
and optimizer; its Python needs both packages.

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

NUM_PROMPTS, NUM_SAMPLES, LEARNING_RATE = 64, 4, 1e-3
WIDTHS = {"fixed": 32, "tailed": 256}
VOCABULARY = 64


def make(folder: Path) -> None:
    """Write two model folders that differ in their eos token, and prompts as parquet and JSONL."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from trainer.cli.make_tiny import make_rows, make_tokenizer

    for kind in WIDTHS:
        tokenizer = make_tokenizer()
        while len(tokenizer) < VOCABULARY:
            tokenizer.add_tokens(f"<filler-{len(tokenizer)}>")
        if kind == "fixed":
            tokenizer.add_special_tokens({"eos_token": "<never>"})

        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
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


def recorded_run(
    folder: Path, kind: str, steps: int
) -> tuple[list[float], list[Any], list[list[Any]]]:
    """Run our side; return its rewards, the batch of every update, and the weights around each."""
    from workers.roles import actor as role
    from workers.training import engine as training

    batches: list[Any] = []
    weights: list[list[Any]] = []
    update, guarded_step = role.update, training.guarded_step

    def noting_update(engine: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append({name: column.clone() for name, column in data.batch.items()})
        return update(engine, data, *args, **kwargs)

    def noting_step(optimizer: Any, parameters: Any, *settings: Any) -> float:
        if not weights:
            weights.append([parameter.detach().clone() for parameter in parameters])
        norm = guarded_step(optimizer, parameters, *settings)
        weights.append([parameter.detach().clone() for parameter in parameters])
        return norm

    role.update = noting_update
    training.guarded_step = noting_step
    return ours(folder, kind, steps), batches, weights


def replay(folder: Path, kind: str, steps: int) -> dict[str, list[float]]:
    """Return how far TRL's loss and optimizer move weights from ours on the samples of our run.

    Distances are relative to how far our weights have moved since the first step.
    """
    import torch

    rewards, batches, weights = recorded_run(folder, kind, steps)
    with tempfile.TemporaryDirectory() as run_folder:
        trainer = trl_trainer(folder, kind, steps, 1, run_folder)
    trainer.create_optimizer()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    parameters, distances = list(trainer.model.parameters()), []
    for batch, reached in zip(batches, weights[1:], strict=True):
        prompts = slice(batch["input_ids"].shape[1] - batch["responses"].shape[1])
        inputs = {
            "prompt_ids": batch["input_ids"][:, prompts],
            "prompt_mask": batch["attention_mask"][:, prompts],
            "completion_ids": batch["responses"],
            "completion_mask": batch["response_mask"],
            "advantages": batch["advantages"][:, 0],
            "num_items_in_batch": batch["response_mask"].sum(),
        }

        trainer._compute_loss(trainer.model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(parameters, trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        distances.append(distance(parameters, reached) / distance(weights[0], reached))
    return {"rewards": rewards, "relative_distance": distances}


def distance(weights: Any, others: Any) -> float:
    """Return the Euclidean distance between two lists of tensors."""
    squares = 0.0
    for weight, expected in zip(weights, others, strict=True):
        squares += float((weight.detach() - expected).square().sum())
    return squares**0.5


def main() -> None:
    """Parse the command line, and run the benchmark."""
    import torch

    torch.set_num_threads(1)
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "make":
        folder.mkdir(parents=True, exist_ok=True)
        make(folder)
        return
    compiled = partial(ours, compiles="on")
    side: Any = {"ours": ours, "compiled": compiled, "trl": trl, "replay": replay}[command]
    print(json.dumps(side(folder, sys.argv[3], *map(int, sys.argv[4:]))))


if __name__ == "__main__":
    main()
