"""Compare the core with verl's and with plain Ray, in one run.

    python benchmarks/bench_core.py --verl-python PATH

PATH is the Python of an environment with verl 0.9.1 and the same versions of Ray and torch. Without
it, only verl-like and plain Ray are measured. Each side runs in a separate process, one after the
other, for several rounds; results are medians over rounds. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from sides import HERE, ask

SIDE = HERE / "core_side.py"
LIMITS = {
    "echo_mb_per_s over verl": (">=", 2.5),
    "echo_mb_per_s over bare": (">=", 0.8),
    "padded_echo_ms over verl": ("<=", 0.2),
    "driver_bytes_over_token_bytes": ("<=", 1.3),
    "chain_s": ("<=", 0.35),
    "tiny_echo_ms": ("<=", 3.0),
    "small_echo_ms over bare": ("<=", 1.5),
    "one_to_all_noop_ms over bare": ("<=", 1.5),
    "dumps_loads_54mb_s": ("<=", 0.02),
    "repeat_4_ms": ("<=", 40.0),
    "start_2_workers_s": ("<=", 2.5),
    "construct_us over verl": ("<=", 3.0),
    "union_us over verl": ("<=", 3.0),
    "select_us over verl": ("<=", 3.0),
    "slice_us over verl": ("<=", 3.0),
    "two_naps_s": ("<=", 0.55),
    "entropy_extra_mib": ("<=", 64.0),
    "import_s": ("<=", 3.0),
}
IMPORT = """
import sys, time
began = time.perf_counter()
import verl_like
from verl_like import DataProto, LocalWorkerGroup, Worker, register
seconds = time.perf_counter() - began
assert not {"ray", "transformers"} & set(sys.modules), "ray or transformers was imported"
print([seconds])
"""
MEMORY = f"""
import gc, resource, sys
sys.path.insert(0, {str(HERE)!r})
import torch
from core_side import geometric_lengths
from verl_like import DataProto
from verl_like.batch.ragged import RaggedTensor
torch.set_num_threads(1)

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def made(names, dtype, spans):
    '''As a group's pieces are joined on the driver: in memory of the batch's own.'''
    values = torch.ones(1, dtype=dtype).expand(num_tokens)
    return {{name: spans.with_values(values).clone() for name in names}}

lengths = geometric_lengths(1024, 3000, 32768)
num_tokens = int(lengths.sum())
spans = RaggedTensor(torch.ones(num_tokens), lengths, 32768)
warm = DataProto.from_dict(made("ab", torch.int64, spans)).union(DataProto())[:2]
del warm
before = resident()
ids = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
batch = DataProto.from_dict(made(ids, torch.int64, spans))
for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "advantages"):
    batch = batch.union(DataProto.from_dict(made([name], torch.float32, spans)))
batch.reorder(torch.randperm(1024))
parts = batch.split(256)
del batch
batch = DataProto.concat(parts)
del parts
held = resident() - before
tokens = sum(column.values.nbytes for column in batch.columns.values())
print([held / tokens, tokens])
"""
"""Columns of 1,024 samples are merged, reordered, split and concatenated in one process."""
ENTROPY = """
import resource, torch
from verl_like.tensor_ops import logprobs_and_entropy_from_logits
torch.set_num_threads(1)
labels = torch.zeros(2048, dtype=torch.int64)
of = lambda x: logprobs_and_entropy_from_logits(x, labels[: len(x)])[1].sum().backward()
of(torch.randn(8, 32768, requires_grad=True))
logits = torch.randn(2048, 32768, requires_grad=True)
gradient = torch.ones_like(logits)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
del gradient
of(logits)
print([peak() - before])
"""


def main() -> None:
    """Measure the sides one after the other, then print which limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl-python", help="Python of an environment with verl 0.9.1")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sides = {"ours": sys.executable, "bare": sys.executable}
    if options.verl_python:
        sides["verl"] = options.verl_python

    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, python in sides.items():
            rounds[side].append(ask(python, str(SIDE), side))
    figures = {
        side: {k: statistics.median(r[k] for r in all_) for k in all_[0]}
        for side, all_ in rounds.items()
    }

    ours = figures["ours"]
    ours["import_s"] = statistics.median(ask(sys.executable, "-c", IMPORT)[0] for _ in range(3))
    ours["driver_bytes_over_token_bytes"] = ask(sys.executable, "-c", MEMORY)[0]
    ours["entropy_extra_mib"] = ask(sys.executable, "-c", ENTROPY)[0]

    verdicts = {}
    for name, (relation, limit) in LIMITS.items():
        key, _, peer = name.partition(" over ")
        if peer and peer not in figures:
            continue
        value = ours[key] / figures[peer][key] if peer else ours[key]
        verdicts[name] = {
            "value": round(value, 4),
            "limit": f"{relation} {limit}",
            "holds": value >= limit if relation == ">=" else value <= limit,
        }

    print(json.dumps({"figures": figures, "limits": verdicts}, indent=2))


if __name__ == "__main__":
    main()
