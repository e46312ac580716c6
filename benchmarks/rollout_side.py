"""One side of `bench_rollout.py`, in a separate process.

    python benchmarks/rollout_side.py ours|vllm FOLDER

The script prints a JSON line with the seconds and tokens of each repetition, for every engine and
workload. Engines alternate.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

PROMPTS, PROMPT, FULL, TAIL, VOCAB = 256, 8, 32, 256, 64
STOP = (0, 1)
"""Two of 64 tokens with nearly equal probabilities, so response lengths have a mean of 32."""
ROUNDS = {"full": 21, "tail": 5}
"""Number of rounds; the short workload needs more of them on a machine with other work."""
Run = Callable[[int], int]


def prompts(round_: int) -> list[list[int]]:
    """Return new prompts for each round."""
    return np.random.default_rng(round_).integers(2, VOCAB, size=(PROMPTS, PROMPT)).tolist()


def timed(runs: dict[str, Run]) -> dict[str, list[dict[str, float]]]:
    """Run each side alternately, `ROUNDS` times after one to warm up."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for round_ in range(max(ROUNDS.values()) + 1):
        for name, run in runs.items():
            if round_ > ROUNDS["full" if " full" in name else "tail"]:
                continue
            began, cpu = time.perf_counter(), time.process_time()
            tokens = run(round_)
            times = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
            if round_:
                results[name].append({"tokens": tokens, **times})
    return results


def of_engine(engine: Any, max_tokens: int, stop: tuple[int, ...]) -> Run:
    """Return a run of one of our engines, called as by its role."""
    from workers.rollout.base import SamplingParams
    from workers.rollout.sample import Sample

    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)

    def run(round_: int) -> int:
        requests = [Sample(prompt, 1000 * round_ + i) for i, prompt in enumerate(prompts(round_))]
        outputs = engine.generate(requests, sampling)
        assert all(bool(output.log_probs.isfinite().all()) for output in outputs)
        return sum(len(output.tokens) for output in outputs)

    return run


def ours(folder: Path) -> dict[str, Any]:
    """Measure the native engine and transformers' generate."""
    from transformers import AutoModelForCausalLM

    from workers.rollout.base import EngineLimits
    from workers.rollout.native.engine import NativeRolloutEngine

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    began = time.perf_counter()
    engine = NativeRolloutEngine(
        model, EngineLimits(prompt_width=PROMPT, response_width=TAIL), owns_weights=False
    )
    engine.commit(0)
    start = time.perf_counter() - began

    runs = {
        "native full": of_engine(engine, FULL, ()),
        "hf full": partial(generate_by_hf, model, FULL, ()),
        "native tail": of_engine(engine, TAIL, STOP),
        "hf tail": partial(generate_by_hf, model, TAIL, STOP),
    }
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        left @ right
        rates.append(2 * 2048**3 / (time.perf_counter() - began) / 1e9)
    return {"runs": timed(runs), "start_s": {"native": start}, "matmul_gflops": max(rates)}


def generate_by_hf(model: Any, max_tokens: int, stop: tuple[int, ...], round_: int) -> int:
    """Run transformers' `generate` on all prompts; return the number of tokens."""
    torch.manual_seed(round_)
    ids = torch.tensor(prompts(round_))
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=max_tokens,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
    )[:, PROMPT:]
    ends = torch.isin(generated, torch.tensor(stop or (-1,)))
    is_before_the_end = ends.int().cumsum(1) - ends.int() == 0
    return int(is_before_the_end.sum())


def vllm(folder: Path) -> dict[str, Any]:
    """Measure vLLM's CPU engine: plain, with log-probs and seeds, and with our sampler."""
    from transformers import AutoModelForCausalLM

    from workers.rollout.base import EngineLimits
    from workers.rollout.vllm.engine import VllmRolloutEngine
    from workers.rollout.vllm.in_process import InProcessVllm
    from workers.rollout.vllm.setup import VllmSettings

    began = time.perf_counter()
    engine = VllmRolloutEngine(
        VllmSettings(str(folder)), EngineLimits(prompt_width=PROMPT, response_width=TAIL)
    )
    start = time.perf_counter() - began
    engine.load_weights(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    engine.commit(0)

    assert isinstance(engine.vllm, InProcessVllm)
    llm = engine.vllm.llm
    runs = {
        "vllm full": partial(generate_by_vllm, llm, FULL, (), False),
        "vllm full, log-probs and seeds": partial(generate_by_vllm, llm, FULL, (), True),
        "vllm tail": partial(generate_by_vllm, llm, TAIL, STOP, False),
        "vllm tail, log-probs and seeds": partial(generate_by_vllm, llm, TAIL, STOP, True),
        "vllm full, our sampler": of_engine(engine, FULL, ()),
        "vllm tail, our sampler": of_engine(engine, TAIL, STOP),
    }
    return {"runs": timed(runs), "start_s": {"vllm": start}}


def generate_by_vllm(
    llm: Any, max_tokens: int, stop: tuple[int, ...], with_log_probs: bool, round_: int
) -> int:
    """Run vLLM's `generate` on all prompts; return the number of tokens."""
    from vllm import SamplingParams

    params = []
    for index in range(PROMPTS):
        settings: dict[str, Any] = {"max_tokens": max_tokens, "stop_token_ids": list(stop)}
        if with_log_probs:
            settings |= {"logprobs": 0, "seed": 1000 * round_ + index}
        params.append(SamplingParams(ignore_eos=True, detokenize=False, **settings))

    requests = [{"prompt_token_ids": ids} for ids in prompts(round_)]
    outputs = llm.generate(requests, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"ours": ours, "vllm": vllm}[sys.argv[1]](Path(sys.argv[2]))))
