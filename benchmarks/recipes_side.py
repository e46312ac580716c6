"""One side of the comparison of recipes, in a separate process with one thread.

`bench_recipes.py` runs the sides. The arguments of `python benchmarks/recipes_side.py` are:

    make FOLDER                       write the models and the rows for all sides
    ours|compiled|trl|trl_free FOLDER RECIPE
                                      seconds of a step and all losses, for each kind of rows

RECIPE is `sft`, `reward_model` or `dpo`. Kinds of rows are `full` (40 tokens) and `tailed` (8
prompt tokens, then a geometric number with a mean of 32 and a maximum of 256). A step collates new
rows into a batch, runs the forward and backward pass, clips gradients, and takes an optimizer step.
`compiled` is `ours` with `model.compile=on`, whose first step takes longer. `trl` is TRL's trainer
with default options except precision and recomputation; as on our side, the reference's log-probs
are computed before the first step. `trl_free` also sets `padding_free`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sides import MODEL, tokenizer_of_model

PROMPT, LONGEST = 8, 256
NUM_ROWS, NUM_STEPS = 64, 6
"""Rows (or pairs) per step; number of steps, the first of which warms up."""
LEARNING_RATE = 1e-4
KINDS = ("full", "tailed")
Row = dict[str, list[int]]
Step = Callable[[int], float]
"""Runs the training step with this number, on its own rows; returns the loss."""


def make(folder: Path) -> None:
    """Write a Qwen2 with one million parameters, a scorer of that size, and rows of every kind."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    torch.manual_seed(0)
    tokenizer = tokenizer_of_model()
    for name, model, fields in (
        ("policy", Qwen2ForCausalLM, {}),
        ("scorer", Qwen2ForSequenceClassification, {"num_labels": 1}),
    ):
        config = Qwen2Config(**MODEL, tie_word_embeddings=True, pad_token_id=0, **fields)
        model(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    count = NUM_ROWS * NUM_STEPS
    tails = torch.distributions.Geometric(1 / 32).sample((count, 2)).long().clamp(1, LONGEST)
    of_kind = {"full": torch.full((count, 2), 32), "tailed": tails}
    rows = {kind: [row_of(*pair.tolist()) for pair in of_kind[kind]] for kind in KINDS}
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def row_of(num_chosen: int, num_rejected: int) -> Row:
    """Return random tokens without special ones."""
    lengths = {"prompt_ids": PROMPT, "chosen_ids": num_chosen, "rejected_ids": num_rejected}
    return {name: torch.randint(6, 60, (length,)).tolist() for name, length in lengths.items()}


# ------------------------------------------------------------------------------------------- ours


def our_step(
    recipe: str, folder: Path, rows: Sequence[Row], compiles: str = "auto"
) -> tuple[Step, Any]:
    """Return the step of one of our recipes, batch and update, and the module that it trains."""
    from trainer import load_config
    from verl_like.registry import load_object
    from workers.columns import write_columns
    from workers.cpu.allocator import keep_freed_memory

    keep_freed_memory()  # as in `verl-like sft`
    of_recipe = load_object(OUR_RECIPES[recipe], "recipe")
    settings = [
        f"model.path={model_folder(recipe, folder)}",
        f"model.compile={compiles}",
        "data.train_files=none",
        f"optim.lr={LEARNING_RATE}",
        "trainer.backend=local",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
    ]
    config = load_config(settings, of_recipe)
    trainer = load_object(config.trainer.cls, "trainer.cls")
    worker = load_object(config.role_workers[trainer.recipe.role], "role_workers")(config)
    worker.init_model(total_steps=NUM_STEPS)
    read = [our_row(recipe, row, number) for number, row in enumerate(rows)]
    uids = [str(number) for number in range(NUM_ROWS)]
    reference = our_reference(trainer, worker, read) if recipe == "dpo" else None

    def step(number: int) -> float:
        batch = trainer.make_batch(read[rows_of(number)], uids, pad_token_id=0)
        if reference is not None:
            batch = write_columns(batch, ref_log_probs=reference[rows_of(number)])
        return float(worker.update_model(batch)["train/loss"])

    return step, worker.engine.module


def our_reference(trainer: Any, worker: Any, rows: list[Any]) -> torch.Tensor:
    """Return the untrained model's log-probs [rows, 2], as the trainer computes them once."""
    from workers.columns import read_columns

    batch = trainer.make_batch(rows, [str(number) for number in range(len(rows))], pad_token_id=0)
    results = worker.compute_ref_log_prob(batch)
    return read_columns(results, "response_log_probs")["response_log_probs"]


def our_row(recipe: str, row: Row, number: int) -> Any:
    """Return a row in the form in which the recipe reads it from files."""
    from trainer.data.pairs import PairRow

    chosen = lm_row(row["prompt_ids"], row["chosen_ids"])
    if recipe == "sft":
        return chosen
    pair = PairRow(chosen, lm_row(row["prompt_ids"], row["rejected_ids"]))
    return (number, pair) if recipe == "dpo" else pair


def lm_row(prompt: list[int], response: list[int]) -> Any:
    """Return a row with only the response in the loss."""
    import numpy as np

    from trainer.data.lm_rows import LMRow

    ids = np.array(prompt + response)
    return LMRow(ids, np.arange(len(ids)) >= len(prompt))


OUR_RECIPES = {
    "sft": "trainer.sft.recipe.SFT",
    "reward_model": "trainer.reward_model.recipe.REWARD_MODEL",
    "dpo": "trainer.preference.recipe.DPO",
}


# -------------------------------------------------------------------------------------------- TRL


def trl_step(recipe: str, folder: Path, rows: Sequence[Row], *, free: bool) -> Step:
    """Return the step of one of TRL's trainers: collator, training step, clipping, AdamW."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    name, convert, options = TRL_RECIPES[recipe]
    config = getattr(trl, f"{name}Config")(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=NUM_ROWS,
        max_length=None,
        learning_rate=LEARNING_RATE,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
        **({"padding_free": True} if free else {}),
    )

    model_path = model_folder(recipe, folder)
    trainer_class = getattr(trl, f"{name}Trainer")
    # rows are already tokenized, which DPO's preparation does not support
    as_it_is = type(name, (trainer_class,), {"_prepare_dataset": lambda _, rows, *__, **___: rows})
    trainer = as_it_is(
        model=model_path,
        args=config,
        train_dataset=Dataset.from_list([convert(row) for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(model_path),
    )

    trainer.current_gradient_accumulation_steps = 1
    prepared = list(trainer.train_dataset)
    model = trainer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(number: int) -> float:
        inputs = trainer.data_collator(prepared[rows_of(number)])
        loss = trainer.training_step(model, inputs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def trl_sft_row(row: Row) -> Row:
    """Return the tokens, and labels that leave the prompt out of the loss."""
    response = row["chosen_ids"]
    return {"input_ids": row["prompt_ids"] + response, "labels": [-100] * PROMPT + response}


def trl_reward_row(row: Row) -> Row:
    """Return the tokens of both sides, each with the prompt."""
    prompt = row["prompt_ids"]
    return {side: prompt + row[side] for side in ("chosen_ids", "rejected_ids")}


TRL_RECIPES: dict[str, tuple[str, Callable[[Row], Row], dict[str, Any]]] = {
    "sft": ("SFT", trl_sft_row, {}),
    "reward_model": ("Reward", trl_reward_row, {}),
    "dpo": ("DPO", lambda row: row, {"precompute_ref_log_probs": True}),
}
"""Recipe -> TRL's name of the trainer and config, conversion of a row, more options."""


def model_folder(recipe: str, folder: Path) -> str:
    """Return the folder of the model that the recipe trains."""
    return str(folder / ("scorer" if recipe == "reward_model" else "policy"))


def rows_of(number: int) -> slice:
    """Return the rows of a step."""
    return slice(number * NUM_ROWS, (number + 1) * NUM_ROWS)


def main() -> None:
    """Parse the command line; print a JSON object on the last line of stdout."""
    torch.set_num_threads(1)
    side, folder = sys.argv[1], Path(sys.argv[2])
    if side == "make":
        make(folder)
        return

    recipe = sys.argv[3]
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    results = {}
    for kind in KINDS:
        if side in ("ours", "compiled"):
            step, _ = our_step(recipe, folder, rows[kind], "on" if side == "compiled" else "auto")
        else:
            step = trl_step(recipe, folder, rows[kind], free=side == "trl_free")
        seconds, losses = [], []
        for number in range(NUM_STEPS):
            began = time.perf_counter()
            losses.append(step(number))
            seconds.append(time.perf_counter() - began)
        results[kind] = {"step_s": statistics.median(seconds[1:]), "losses": losses}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
