"""Compare one model on two ranks along an axis of `parallel` with one process.

    python benchmarks/bench_parallel.py [--only sp|tp|pp] [--rounds 3]

The model is the 1M-parameter Qwen2. The script measures the seconds of an update on rows of 4,096
tokens, and the peak memory of a rank on rows of 16,384; for tp also the memory of a log-prob pass
with whole logits of 151,936 tokens. A pass has one row. pp needs several rows; the single process
then gets as many, and no limit applies. Sides run one after the other, with one thread per process.
Results are medians over rounds of the ratios of consecutive runs. Prints JSON with the limits that
are missed. The `floor` of a peak is the ratio if everything were halved except what the process has
before its first call (Python, torch, the weights).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from sides import HERE, ask_ranks
from train_side import MODEL

SIDE = HERE / "parallel_side.py"
AXES = {"sp": "sp=2", "tp": "tp=2", "pp": "pp=2"}
WORDS = 151_936
PASS = "log-prob pass, 151,936 words"
SECONDS, PEAK = "seconds, 4,096 tokens", "peak memory, 16,384 tokens"
LIMITS = {SECONDS: 0.75, PEAK: 0.65, PASS: 0.55}
RUNS = {
    SECONDS: ("seconds", ("update", "4096", "2", "3")),
    PEAK: ("peak_mib", ("update", "16384", "1", "0")),
    PASS: ("needs_mib", ("log_prob", "1024", "1", "0")),
}
RUNS_OF_PP = {
    SECONDS: ("seconds", ("update", "4096", "8", "1")),
    PEAK: ("peak_mib", ("update", "16384", "2", "0")),
}


def measured(folder: str, axes: str, arguments: tuple[str, ...]) -> dict[str, float]:
    """Return the largest values over the ranks."""
    results: dict[str, float] = {}
    for answer in ask_ranks(2 if axes else 1, str(SIDE), folder, axes, *arguments):
        for name, value in answer.items():
            results[name] = max(value, results.get(name, 0.0))
    return results


def main() -> None:
    """Run the sides one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=AXES)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        for name, words in (("few words", MODEL["vocab_size"]), ("many words", WORDS)):
            sizes = {**MODEL, "max_position_embeddings": 32768, "vocab_size": words}
            model = Qwen2ForCausalLM(Qwen2Config(**sizes, pad_token_id=0))
            model.save_pretrained(Path(folder) / name / "model")
        for axis in [options.only] if options.only else AXES:
            runs = RUNS_OF_PP if axis == "pp" else RUNS
            for run, (figure, arguments) in runs.items():
                if run == PASS and axis == "sp":
                    continue
                model = str(Path(folder) / ("many words" if run == PASS else "few words"))
                ratios, alone, ranks = [], {}, {}
                for _ in range(options.rounds):
                    alone = measured(model, "", arguments)
                    ranks = measured(model, AXES[axis], arguments)
                    ratios.append(ranks[figure] / alone[figure])
                results = {"alone": alone[figure], "two ranks": ranks[figure]}
                results["ratio"] = statistics.median(ratios)
                if figure == "peak_mib":
                    halved = (alone[figure] - alone["before_mib"]) / 2
                    results["floor"] = (ranks["before_mib"] + halved) / alone[figure]
                result[f"{axis}: {run}"] = results
    missed = {
        name: results["ratio"]
        for name, results in result.items()
        if not name.startswith("pp") and results["ratio"] > LIMITS[name.partition(": ")[2]]
    }
    print(json.dumps({"found": result, "missed": missed}, indent=2))


if __name__ == "__main__":
    main()
