"""One side of the training comparison, in a separate process with one thread.

`bench_train.py` runs the sides. The arguments of `python benchmarks/train_side.py` are:

    make FOLDER                   write the model and the rows for all sides
    ours|padded|trl FOLDER KIND   seconds of an update on rows of this KIND, as JSON
    rate FOLDER                   rates of a matrix product and of the update
    ranks FOLDER STRATEGY         one rank of several, in torchrun's environment
    memory FOLDER                 peak memory of the log-prob path

KIND is `full` (256 rows of 40 tokens), `tailed` (geometric lengths with a mean of 32 and a maximum
of 256), or `ragged` (real tokens are 40 % of the padded width). `padded` is a plain loop over
padded rows with transformers, 64 rows at a time.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROMPT, ROWS, REPEATS = 8, 256, 5
WIDTHS = {"full": 32, "tailed": 256, "ragged": 192}
MODEL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def make(folder: Path) -> None:
    """Write the 1M-parameter Qwen2, a tokenizer with 64 tokens, and rows of every kind."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from trainer.cli.make_tiny import make_tokenizer

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**MODEL, pad_token_id=0)).save_pretrained(folder)
    tokenizer = make_tokenizer()
    while len(tokenizer) < MODEL["vocab_size"]:
        tokenizer.add_tokens(f"<filler-{len(tokenizer)}>")
    tokenizer.save_pretrained(folder)

    tailed = torch.distributions.Geometric(1 / 32).sample((ROWS,)).long()
    lengths = {
        "full": torch.full((ROWS,), WIDTHS["full"]),
        "tailed": tailed.clamp(1, WIDTHS["tailed"]),
        "ragged": torch.randint(1, 145, (ROWS,)),
    }
    for kind, lengths_of_kind in lengths.items():
        width = WIDTHS[kind]
        mask = (torch.arange(width) < lengths_of_kind[:, None]).long()
        ids = torch.randint(1, MODEL["vocab_size"], (ROWS, PROMPT + width))
        rows = {"ids": ids, "response_mask": mask, "advantages": torch.randn(ROWS)}
        torch.save(rows, folder / f"{kind}.pt")


def batch_of(folder: Path, kind: str) -> Any:
    """Return rows of this kind with every column that an update reads."""
    from verl_like.batch.protocol import DataProto

    stored = torch.load(folder / f"{kind}.pt")
    ids, inside = stored["ids"], stored["response_mask"]
    mask = torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.long), inside], dim=1)
    columns = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:] * inside,
        "response_mask": inside,
        "old_log_probs": torch.full(inside.shape, -4.2),
        "advantages": stored["advantages"][:, None] * inside,
    }
    return DataProto.from_dict(columns)


def updater(folder: Path, strategy: str = "fsdp", **model: Any) -> Callable[[Any], Any]:
    """Return the actor's update, on this process's rank."""
    from types import SimpleNamespace

    from workers.config import (
        ActorRolloutRefConfig,
        ModelConfig,
        RolloutCorrectionConfig,
        WorkersConfig,
    )
    from workers.roles.actor import ActorWorker

    policy = ActorRolloutRefConfig(model=ModelConfig(path=str(folder), **model))
    policy.actor.ppo_mini_batch_size = ROWS
    policy.actor.ppo_micro_batch_size_per_gpu = 64
    policy.actor.use_dynamic_bsz = True
    policy.actor.ppo_max_token_len_per_gpu = 2560
    policy.actor.optim.lr = 1e-4
    policy.actor.strategy = strategy
    algorithm = SimpleNamespace(rollout_correction=RolloutCorrectionConfig())
    config = WorkersConfig(actor_rollout_ref=policy, data=None, trainer=None, algorithm=algorithm)
    worker = ActorWorker(config)
    worker.init_model(100)
    return worker.update_actor


def padded_updater(folder: Path, kind: str) -> Callable[[], None]:
    """Return PPO's update on padded rows, with only transformers and torch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = batch_of(folder, kind).batch

    def update() -> None:
        for part in batch.split(64):
            (padded_loss(model, part) / batch["response_mask"].sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def padded_loss(model: Any, part: Any) -> torch.Tensor:
    """Return PPO's clipped loss of some padded rows, summed over their response tokens."""
    logits = model(
        part["input_ids"],
        part["attention_mask"],
        position_ids=part["position_ids"],
        use_cache=False,
        logits_to_keep=part["responses"].shape[1] + 1,
    ).logits
    chosen = part["responses"][..., None]
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, chosen).squeeze(-1)
    ratio = (log_probs - part["old_log_probs"]).clamp(-20, 20).exp()
    advantages = part["advantages"]
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (losses * part["response_mask"]).sum()


def trl_updater(folder: Path, kind: str) -> Callable[[], None]:
    """Return TRL's own update on the same rows: forward, backward, clipping and optimizer step."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    stored = torch.load(folder / f"{kind}.pt")
    ids, inside = stored["ids"], stored["response_mask"]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        num_generations=4,
        beta=0.0,
        learning_rate=1e-4,
        max_completion_length=WIDTHS[kind],
        bf16=False,
        use_cpu=True,
        report_to=[],
        loss_type="bnpo",
        gradient_checkpointing=False,
    )

    trainer = GRPOTrainer(
        model=str(folder),
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * ROWS}),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )
    trainer.current_gradient_accumulation_steps = 1

    model = trainer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": ids[:, PROMPT:] * inside,
        "completion_mask": inside,
        "advantages": stored["advantages"],
        "old_per_token_logps": torch.full(inside.shape, -4.2),
        "num_items_in_batch": inside.sum(),
    }

    def update() -> None:
        trainer.compute_loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def seconds(work: Callable[[], Any]) -> float:
    """Return the median wall time of some calls, after one to warm up."""
    work()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def rate(folder: Path) -> dict[str, float]:
    """Return the rate of the update, at 6 N operations per token, relative to a matrix product."""
    left, right = torch.randn(10240, 128), torch.randn(128, 512)
    result = {}
    for name, model in (("float32", {}), ("bfloat16", {"dtype": "bfloat16"})):
        update, batch = updater(folder, **model), batch_of(folder, "full")
        dtype = getattr(torch, name)
        first, second = left.to(dtype), right.to(dtype)
        num_weights = sum(p.numel() for p in update.__self__.engine.parameters())
        flops = 6 * num_weights * ROWS * (PROMPT + WIDTHS["full"])
        update(batch)

        for _ in range(REPEATS):
            began = time.perf_counter()
            for _ in range(20):
                first @ second
            product = 20 * 2 * 10240 * 128 * 512 / (time.perf_counter() - began)

            began = time.perf_counter()
            update(batch)
            rate_of_update = flops / (time.perf_counter() - began)

            result.setdefault(f"{name}_product_gflops", []).append(product / 1e9)
            result.setdefault(f"{name}_update_gflops", []).append(rate_of_update / 1e9)
            result.setdefault(f"{name}_share", []).append(rate_of_update / product)
    return {name: statistics.median(values) for name, values in result.items()}


def ranks(folder: Path, strategy: str) -> dict[str, float]:
    """Return one rank's seconds of an update, and the memory of its parameters and optimizer."""
    import torch.distributed as dist

    from verl_like.batch.split import split_rows

    update = updater(folder, strategy)
    worker = update.__self__
    batch = split_rows(batch_of(folder, "full"), worker.world_size)[worker.rank]
    time_of_update = seconds(lambda: update(batch))
    tensors = list(worker.engine.parameters())
    for state in worker.engine.optimizer.state.values():
        tensors += state.values()
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    dist.destroy_process_group()
    return {
        "update_s": time_of_update,
        "state_mib": sum(t.numel() * t.element_size() for t in tensors) / 2**20,
    }


def memory(folder: Path) -> dict[str, float]:
    """Return the peak memory of log-probs and entropy, both passes, relative to the logits."""
    from verl_like.tensor_ops import logprobs_and_entropy_from_logits

    tokens, vocabulary = 4096, 65536
    hidden = torch.randn(tokens, 16, requires_grad=True)
    head = torch.randn(vocabulary, 16)
    labels = torch.randint(0, vocabulary, (tokens,))
    with torch.no_grad():
        # From here on, the process has already allocated the logits and buffers of matrix products.
        (hidden @ head.t()) @ head
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log_probs, entropy = logprobs_and_entropy_from_logits(
        hidden @ head.t(), labels, inplace_backward=True
    )
    (log_probs.sum() - 0.01 * entropy.sum()).backward()
    over = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    logits = tokens * vocabulary * 4 / 2**20
    return {"logits_mib": logits, "over_the_logits_mib": over}


def main() -> None:
    """Parse the command line; print a JSON object on the last line of stdout."""
    torch.set_num_threads(1)
    side, folder = sys.argv[1], Path(sys.argv[2])
    kind = sys.argv[3] if len(sys.argv) > 3 else ""
    if side == "make":
        make(folder)
    elif side == "ranks":
        print(json.dumps(ranks(folder, kind)))
    elif side in ("rate", "memory"):
        print(json.dumps({"rate": rate, "memory": memory}[side](folder)))
    else:
        if side == "ours":
            update, batch = updater(folder), batch_of(folder, kind)
            work: Callable[[], Any] = lambda: update(batch)  # noqa: E731
        else:
            work = (padded_updater if side == "padded" else trl_updater)(folder, kind)
        print(json.dumps({"update_s": seconds(work)}))


if __name__ == "__main__":
    main()
