"""Compare an int8 reference with a float32 one: memory while loading, seconds, and log-probs.

    python benchmarks/bench_quantization.py [--hidden 1024] [--layers 8] [--rows 32]

Each side is a `ReferenceWorker` with a Llama with random weights, in its own process with one
thread. Memory is the growth of anonymous memory (`RssAnon`, which excludes file pages) to its peak
while the model is loaded, as sampled by a thread. Linear weights are those that `quantizable`
yields. Seconds are the minimum CPU time of three scorings of the rows. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from sides import ask, full_rows, make_llama

from verl_like import DataProto
from verl_like.process.info import OWN_PROCESS

VOCABULARY, PROMPT, RESPONSE = 512, 8, 56


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """Write random weights that are large enough to give tokens different probabilities."""
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 3 * hidden}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    make_llama(folder, hidden, layers, **sizes, **heads, initializer_range=hidden**-0.5)


def anonymous_mib() -> float:
    """Return the memory of this process that is not backed by files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


class Peak:
    """Context that samples `anonymous_mib`; at the end, it has the growth to the peak."""

    def __enter__(self) -> Peak:
        self.before = self.largest = anonymous_mib()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.ended.wait(0.001):
            self.largest = max(self.largest, anonymous_mib())

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.mib = max(self.largest, anonymous_mib()) - self.before


def make_reference(folder: Path, num_rows: int, quantization: str | None) -> Any:
    """Return a reference that has not loaded its model."""
    from workers.config import ActorRolloutRefConfig, ModelConfig, RefConfig, WorkersConfig
    from workers.roles.reference import ReferenceWorker

    policy = ActorRolloutRefConfig(
        model=ModelConfig(path=str(folder)),
        ref=RefConfig(quantization=quantization, log_prob_micro_batch_size_per_gpu=num_rows),
    )
    policy.actor.use_dynamic_bsz = False
    config = WorkersConfig(actor_rollout_ref=policy, data=None, trainer=None, algorithm=None)
    return ReferenceWorker(config)


def run_side(folder: Path, num_rows: int, quantization: str | None) -> dict[str, Any]:
    """Measure one side, in this process."""
    from workers.models.causal_lm import quantizable
    from workers.models.quantize import Int8Weight

    # modules that are imported only once
    make_reference(folder / "tiny", num_rows, quantization).init_model()
    reference = make_reference(folder / "whole", num_rows, quantization)
    with Peak() as peak:
        reference.init_model()

    linear_bytes = 0
    for _, layer in quantizable(reference.engine.module):
        weight = layer.weight
        parts = (weight.numbers, weight.scales) if isinstance(weight, Int8Weight) else (weight,)
        linear_bytes += sum(part.untyped_storage().nbytes() for part in parts)
    words = range(3, VOCABULARY)
    rows = DataProto.from_dict(full_rows(num_rows, PROMPT, RESPONSE, words, (), 0.0))
    seconds = []
    for _ in range(3):
        began = time.process_time()
        scored = reference.compute_ref_log_prob(rows)
        seconds.append(time.process_time() - began)
    return {
        "load_peak_mib": peak.mib,
        "linear_mib": linear_bytes / 2**20,
        "score_s": min(seconds),
        "log_probs": scored.batch["ref_log_prob"].flatten().tolist(),
    }


def compare(hidden: int, layers: int, num_rows: int) -> dict[str, float]:
    """Compare both sides; return int8's values as fractions of float32's."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "whole", hidden, layers)
        make_model(Path(folder) / "tiny", 64, 1)
        model_mib = (Path(folder) / "whole" / "model.safetensors").stat().st_size / 2**20
        sides = {
            side: ask(sys.executable, __file__, f"--rows={num_rows}", f"--folder={folder}", side)
            for side in ("float32", "int8")
        }

    report = {"model_mib": model_mib}
    log_probs = [torch.tensor(figures.pop("log_probs")) for figures in sides.values()]
    for name in ("load_peak_mib", "linear_mib", "score_s"):
        report |= {f"{side}, {name}": figures[name] for side, figures in sides.items()}
    report["load peak of int8 / float32 model"] = sides["int8"]["load_peak_mib"] / model_mib
    shares = [sides[side]["linear_mib"] for side in ("int8", "float32")]
    report["linear weights, int8 / float32"] = shares[0] / shares[1]
    report["|log-prob apart|, mean"] = float((log_probs[0] - log_probs[1]).abs().mean())
    return report


def main() -> None:
    """Parse the command line; print a JSON object on the last lines of stdout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("--hidden", 1024), ("--layers", 8), ("--rows", 32)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("side", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.side:
        torch.set_num_threads(1)
        os.environ[OWN_PROCESS] = "1"
        quantization = "int8" if options.side == "int8" else None
        print(json.dumps(run_side(options.folder, options.rows, quantization)))
        return
    report = compare(options.hidden, options.layers, options.rows)
    print(json.dumps({name: float(f"{value:.4g}") for name, value in report.items()}, indent=1))


if __name__ == "__main__":
    main()
