"""Compare `verl-like serve` over HTTP with the same calls in process.

    python benchmarks/bench_serve.py [--model DIR] [--only step,samples,tenants,requests]

- step: `forward_backward` and `optim_step` on a GRPO batch (64 rows of 128 tokens), over HTTP and
  as two calls of the server's own methods; HTTP may take at most 1.10 times as long
- samples: 64 concurrent sample requests from the SDK, in a separate process, compared with one
  request for 64 samples; at least 0.9 times the tokens per second. `client_s` is the SDK's time for
  64 requests to a server that responds immediately, and `server_share` is the ratio without this
  time
- tenants: memory that 16 idle clients with adapters of rank 32 add, compared with the adapters'
  size
- requests: memory after 1,000 requests, compared with the memory after 100

Run it with `.venv-tinker/bin/python`, which `tests/run_tinker.sh` builds. Without --model, it uses
a tiny model from `verl-like make-tiny`. The sides alternate in each round. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import queue
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.trainer.serve.clients import Client, config_of, served
from trainer.cli import make_tiny
from trainer.serve.rows import Datum, RequestLoss
from trainer.serve.server import SWITCH_S
from trainer.serve.training_ops import ServedModel
from trainer.serve.wire import PROTOBUF, sample_output
from trainer.serve.work_queue import WorkQueue
from workers.roles.served import client_loss
from workers.training.optim import OptimStepSettings

ROWS, LENGTH, DRAWN = 64, 128, 64
STEP = OptimStepSettings(lr=1e-5, grad_clip=1.0, ends_update=False)


def memory_mb() -> float:
    """Return the resident memory of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def median_s(*sides: Callable[[], Any], rounds: int) -> list[float]:
    """Return the median seconds of the sides, which alternate, without the first round."""
    times: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for side, durations in zip(sides, times, strict=True):
            begin = time.perf_counter()
            side()
            if number:
                durations.append(time.perf_counter() - begin)
    return [statistics.median(durations) for durations in times]


def rows(vocabulary: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Return rows as in a GRPO batch."""
    rng = random.Random(0)
    datums = []
    for _ in range(ROWS):
        tokens = [rng.randrange(vocabulary) for _ in range(LENGTH + 1)]
        numbers = {"logprobs": [-4.0] * LENGTH, "advantages": [rng.gauss(0, 1)] * LENGTH}
        datums.append((tokens[:-1], {"target_tokens": tokens[1:], **numbers}))
    return datums


def measure_step(work_queue: WorkQueue, client: Client, rounds: int) -> dict[str, float]:
    """Return the seconds of a step over HTTP and in process."""
    model, datums = client.model(work_queue.base_model, rank=32), rows(work_queue.limits.vocabulary)
    arrays = [
        Datum(tokens, {name: np.asarray(values) for name, values in inputs.items()})
        for tokens, inputs in datums
    ]
    served_model = ServedModel(model.name, "actor", 32)  # used for calls without HTTP
    loss = RequestLoss("importance_sampling", client_loss("importance_sampling"), {})

    def over_http() -> None:
        promise = model.backward(datums, "importance_sampling")
        stepped = model.step(learning_rate=1e-5)
        client.result(promise)
        client.result(stepped)

    def in_process() -> None:
        work_queue.ops.forward_backward(served_model, arrays, loss)
        work_queue.ops.optim_step(served_model, STEP)

    http_s, verbs_s = median_s(over_http, in_process, rounds=rounds)
    return {"http_s": http_s, "verbs_s": verbs_s, "times": http_s / verbs_s}


def measure_samples(work_queue: WorkQueue, url: str, rounds: int) -> dict[str, float]:
    """Return the SDK's seconds for many requests and for one, in a separate process."""
    served_s = sdk_seconds(url, work_queue.base_model, rounds)
    with stub() as stub_url:
        client_s = sdk_seconds(stub_url, work_queue.base_model, rounds)["many"]
    many_s, one_s = served_s["many"], served_s["one"]
    return {
        "many_tokens_s": ROWS * DRAWN / many_s,
        "one_tokens_s": ROWS * DRAWN / one_s,
        "share": one_s / many_s,
        "client_s": client_s,
        "server_share": one_s / max(many_s - client_s, one_s),
    }


def sdk_seconds(url: str, model: str, rounds: int) -> dict[str, float]:
    """Run `time_sdk` in a new process."""
    command = [sys.executable, __file__, "--url", url, "--model", model, "--rounds", str(rounds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def time_sdk(url: str, model: str, rounds: int) -> dict[str, float]:
    """Return the SDK's shortest seconds for 64 requests, and for one request of 64 samples."""
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    sampler = service.create_sampling_client(base_model=model)
    prompt = tinker.types.ModelInput.from_ints(list(range(8, 24)))
    params = tinker.types.SamplingParams(max_tokens=DRAWN, stop=[])

    def sample(requests: int) -> float:
        begin = time.perf_counter()
        futures = [sampler.sample(prompt, ROWS // requests, params) for _ in range(requests)]
        for future in futures:
            assert len(future.result().sequences) == ROWS // requests
        return time.perf_counter() - begin

    times = [(sample(ROWS), sample(1)) for _ in range(rounds + 1)][1:]
    return {"many": min(many for many, _ in times), "one": min(single for _, single in times)}


@contextlib.contextmanager
def stub() -> Iterator[str]:
    """Context with a server that immediately returns the same samples for every request."""
    facts = {"session_id": "s", "sampling_session_id": "s:sample:0", "status": "accepted"}
    drawn = ([8] * DRAWN, [-1.0] * DRAWN, "length")
    results = {count: sample_output([drawn] * count) for count in (1, ROWS)}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = re.search(r"content-length: *(\d+)", head)
                body = await reader.readexactly(int(size[1]) if size else 0)
                kind, result = "application/json", json.dumps(facts).encode()
                if "/asample" in head:
                    count = json.loads(body)["num_samples"]
                    names = {"sample_sequence_ids": ["any"] * count}
                    result = json.dumps({"request_id": str(count), **names}).encode()
                elif "/retrieve_future" in head:
                    kind, result = PROTOBUF, results[int(json.loads(body)["request_id"])]
                sizes = f"content-type: {kind}\r\ncontent-length: {len(result)}\r\n\r\n"
                writer.write(f"HTTP/1.1 200 OK\r\n{sizes}".encode() + result)

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url.put(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await asyncio.to_thread(is_over.wait)
        server.close()

    url: queue.SimpleQueue[str] = queue.SimpleQueue()
    is_over = threading.Event()
    # `run` cancels the connections that are still open
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    yield url.get()
    is_over.set()
    thread.join()


def measure_tenants(work_queue: WorkQueue, url: str) -> dict[str, float]:
    """Return the memory of idle clients."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(url)) for _ in range(17)]
        clients[0].model(work_queue.base_model, rank=32)
        before = memory_mb()
        for client in clients[1:]:
            client.model(work_queue.base_model, rank=32)
        added = memory_mb() - before
        saved = clients[0].get("training_runs")["cursor"]
        assert saved["total_count"] == 0, "idle clients have saved nothing"
        return {"added_mb": added, "adapters_mb": 16 * adapter_mb(work_queue, 32)}


def adapter_mb(work_queue: WorkQueue, rank: int) -> float:
    """Return the megabytes of one adapter on all linear layers except the head, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work_queue.base_model)
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(rank * sum(layer.weight.shape) * 4 for layer in layers) / 2**20


def measure_requests(work_queue: WorkQueue, client: Client) -> dict[str, float]:
    """Return the memory over many requests."""
    model, datum = (
        client.model(work_queue.base_model, 1, rank=4),
        rows(work_queue.limits.vocabulary)[:1],
    )
    memory = {}
    for count in range(1, 501):
        client.result(model.backward(datum, "importance_sampling"))
        client.result(model.step(learning_rate=1e-5))
        if count in (50, 500):
            memory[f"after_{2 * count}_mb"] = memory_mb()
    return memory


def main() -> None:
    """Run the selected measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="")
    parser.add_argument("--only", default="step,samples,tenants,requests")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--url", default="", help="time the SDK against this server")
    options = parser.parse_args()
    if options.url:
        print(json.dumps(time_sdk(options.url, options.model, options.rounds)))
        return
    sys.setswitchinterval(SWITCH_S)
    wanted, results = options.only.split(","), {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(options.model or make_tiny.make(Path(scratch) / "tiny") / "model")
        limits = ("data.max_prompt_length=64", "data.max_response_length=64")
        config = config_of(model, Path(scratch) / "saved", *limits, rank=32)
        with served(config) as (work_queue, url), Client(url) as client:
            if "step" in wanted:
                results["step"] = measure_step(work_queue, client, options.rounds)
            if "samples" in wanted:
                results["samples"] = measure_samples(work_queue, url, options.rounds)
            if "tenants" in wanted:
                results["tenants"] = measure_tenants(work_queue, url)
            if "requests" in wanted:
                results["requests"] = measure_requests(work_queue, client)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
