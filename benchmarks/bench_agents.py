"""Measure multi-turn trajectories with the native engine.

    python benchmarks/bench_agents.py [--only speed,overhead,crowd,hang,soak] [--rounds 5]

- speed: 64 trajectories of 8 turns with 64 tokens each, compared with running every turn as one
  batch: with transformers' `generate` on the whole history, which is tokenized again, and with the
  native engine, which prefills the whole history
- overhead: 256 trajectories of 4 turns in an environment without cost, compared with single-turn
  samples of the same number of tokens
- crowd: the memory of all processes while 1,024 trajectories wait for their environments, and its
  peak while they run together, next to the memory of model, engine and host
- hang: the time that one of 256 environments adds to a batch if it never returns
- soak: processes, handles and memory over 10,000 trajectories, of which one in fifty fails

The model is a Qwen2 with a million parameters, on one thread. In each round, which has new prompts,
the sides run one after the other. CPU seconds are those of all processes. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from workers.agents import Environment, Observation, TrajectoryEnd
from workers.cpu.allocator import keep_freed_memory

HERE = Path(__file__).resolve()
TURNS, TOKENS, ROWS = 8, 64, 64
PROMPT = 16
Side = Callable[[int], int]


class Free(Environment):
    """Returns at once, except that one environment never returns, and one in `raises` fails."""

    def __init__(self, turns: int, hangs: int = -1, raises: int = 0) -> None:
        self.turns, self.hangs, self.raises = turns, hangs, raises

    def reset(self, row: Any, rng: Any) -> str:
        """Return the first observation, which does not contain the row's number."""
        self.num_replies, self.is_hung = 0, row["number"] == self.hangs
        self.fails = self.raises > 0 and row["number"] % self.raises == 0
        return "go"

    def step(self, text: str) -> Observation | TrajectoryEnd:
        """Return an observation of a few tokens, or end the trajectory."""
        self.num_replies += 1
        if self.is_hung:
            time.sleep(3600)
        if self.fails:
            raise RuntimeError("out of order")
        return (
            TrajectoryEnd(1.0)
            if self.num_replies == self.turns
            else Observation(f"next {self.num_replies}", 0.1)
        )


class Model:
    """A Qwen2 with random weights, its tokenizer, and the sampling settings."""

    def __init__(self) -> None:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        from trainer.cli.make_tiny import make_tokenizer

        self.tokenizer = make_tokenizer()
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(self.tokenizer),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
        )
        self.module = Qwen2ForCausalLM(config).eval()

    def engine(self, width: int) -> Any:
        """Return a native engine for responses of up to `width` tokens."""
        from workers.rollout.base import EngineLimits
        from workers.rollout.native.engine import NativeRolloutEngine

        limits = EngineLimits(prompt_width=PROMPT, response_width=width, max_num_seqs=256)
        engine = NativeRolloutEngine(self.module, limits, owns_weights=False)
        engine.commit(0)
        return engine

    def chat(self) -> Any:
        """Return the chat for the tokenizer's template."""
        from workers.agents.chat import TurnRenderer

        return TurnRenderer(self.tokenizer, [], ())

    def prompt(self, round_: int, row: int) -> str:
        """Return a prompt that is unique to the round and row."""
        return f"{(7919 * round_ + row) % 100000:05d}"


class Trajectories:
    """Runs rounds of trajectories on one engine and one host."""

    def __init__(self, model: Model, rows: int, turns: int, tokens: int, **kwargs: Any) -> None:
        from workers.agents.host import EnvironmentHost
        from workers.agents.loop import TurnLoop
        from workers.agents.players import spec_of
        from workers.config import EnvironmentConfig
        from workers.rollout.base import SamplingParams

        step_s = kwargs.pop("step_s", 60.0)
        self.model, self.rows = model, rows
        self.width = turns * tokens + (turns - 1) * 16
        self.config = EnvironmentConfig(
            path=f"{HERE}:Free",
            kwargs={"turns": turns, **kwargs},
            max_turns=turns,
            max_tokens_per_turn=tokens,
            step_timeout_s=step_s,
            retries=0,
        )
        self.engine = model.engine(self.width)
        self.host = EnvironmentHost(spec_of(self.config), step_s)
        self.loop = TurnLoop(self.engine, self.host, model.chat(), self.config)
        self.sampling = SamplingParams(max_tokens=self.width, stop_token_ids=())

    def play(self, round_: int) -> list[Any]:
        """Run one round; return its trajectories."""
        from workers.agents.trajectory import TrajectoryStart

        starts = []
        for row in range(self.rows):
            key = 100000 * round_ + row
            prompt = self.model.prompt(round_, row)
            starts.append(TrajectoryStart(prompt, {"number": row}, (key, key), key, f"row {row}"))
        return self.loop.play(starts, self.sampling, num_open=1024)

    def run(self, round_: int) -> int:
        """Run one round; return the number of sampled tokens."""
        return sum(int((result.sample.versions >= 0).sum()) for result in self.play(round_))


def by_generate(model: Model, rows: int) -> Side:
    """Run each turn as one batch of `generate` on newly tokenized texts; all rows wait for all."""

    def run(round_: int) -> int:
        import torch

        torch.manual_seed(round_)
        tokenizer, chat = model.tokenizer, model.chat()
        tokenizer.padding_side = "left"
        texts = []
        environments = [Free(TURNS) for _ in range(rows)]
        for row, env in enumerate(environments):
            first = env.reset({"number": row}, None)
            question = f"{model.prompt(round_, row)}\n{first}"
            texts.append(tokenizer.decode(chat.prompt([{"role": "user", "content": question}])))
        for turn in range(TURNS):
            batch = tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True)
            generated = model.module.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=True,
                top_k=0,
                max_new_tokens=TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )[:, batch["input_ids"].shape[1] :]
            for row, text in enumerate(tokenizer.batch_decode(generated)):
                answer = environments[row].step(text)
                texts[row] += text
                if turn + 1 < TURNS:
                    message = {"role": "user", "content": answer.text}
                    texts[row] += tokenizer.decode(chat.between(None, [message]))
        return rows * TURNS * TOKENS

    return run


def by_barrier(model: Model, rows: int) -> Side:
    """Run each turn as one batch of the native engine, which prefills the whole history."""
    engine = model.engine(TURNS * (TOKENS + 16))

    def run(round_: int) -> int:
        import torch

        from workers.rollout.base import SamplingParams
        from workers.rollout.sample import Sample

        chat = model.chat()
        environments = [Free(TURNS) for _ in range(rows)]
        samples = []
        for row, env in enumerate(environments):
            first = env.reset({"number": row}, None)
            question = f"{model.prompt(round_, row)}\n{first}"
            ids = chat.prompt([{"role": "user", "content": question}])
            samples.append(Sample(ids, 100000 * round_ + row, end_at=TOKENS))
        sampling = SamplingParams(max_tokens=TURNS * (TOKENS + 16), stop_token_ids=())
        for turn in range(TURNS):
            samples = engine.generate(samples, sampling)
            if turn + 1 == TURNS:
                break
            for row, sample in enumerate(samples):
                text = model.tokenizer.decode(sample.tokens[-TOKENS:].tolist())
                answer = environments[row].step(text)
                ids = torch.tensor(chat.between(None, [{"role": "user", "content": answer.text}]))
                unknown = torch.full((len(ids),), -1, dtype=torch.int32)
                read = replace(
                    sample,
                    tokens=torch.cat([sample.tokens, ids]),
                    log_probs=torch.cat([sample.log_probs, torch.full((len(ids),), torch.nan)]),
                    # with a version that the engine does not have, so that it prefills the history
                    # in one pass
                    versions=torch.cat([sample.versions.where(sample.versions < 0, 99), unknown]),
                    finish_reason="abort",
                    end_at=len(sample.tokens) + len(ids) + TOKENS,
                )
                samples[row] = read
        return rows * TURNS * TOKENS

    return run


def compare(sides: dict[str, Side], rounds: int) -> dict[str, Any]:
    """Return the median seconds of every side, and its ratio to the first one within rounds."""
    times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        order = list(sides.items()) if round_ % 2 else list(sides.items())[::-1]
        for name, run in order:
            began, cpu = time.perf_counter(), cpu_seconds()
            tokens = run(round_)
            took = time.perf_counter() - began, cpu_seconds() - cpu, tokens
            if round_:
                times[name].append(took)
    results: dict[str, Any] = {}
    first = times[next(iter(sides))]
    for name, all_rounds in times.items():
        ratios = [
            (timing[0] / base[0], timing[1] / base[1])
            for timing, base in zip(all_rounds, first, strict=True)
        ]
        results[name] = {
            "s": round(statistics.median(timing[0] for timing in all_rounds), 3),
            "cpu_s": round(statistics.median(timing[1] for timing in all_rounds), 3),
            "tokens_per_s": round(
                statistics.median(timing[2] / timing[0] for timing in all_rounds)
            ),
            "times_the_first": [round(ratio[0], 2) for ratio in ratios],
            "times_the_first_cpu": [round(ratio[1], 2) for ratio in ratios],
        }
    return results


def speed(rounds: int) -> dict[str, Any]:
    """Compare trajectories with the two ways that have a barrier after each turn."""
    model = Model()
    ours = Trajectories(model, ROWS, TURNS, TOKENS)
    try:
        sides = {
            "ours": ours.run,
            "generate": by_generate(model, ROWS),
            "native, a batch a turn": by_barrier(model, ROWS),
        }
        return compare(sides, rounds)
    finally:
        ours.host.close()


def overhead(rounds: int) -> dict[str, Any]:
    """Compare 256 trajectories of 4 turns with as many tokens in one turn."""
    from workers.rollout.base import SamplingParams
    from workers.rollout.sample import Sample

    model = Model()
    ours = Trajectories(model, 256, 4, 32)
    row = ours.play(0)[0].sample
    drawn, length = int((row.versions >= 0).sum()), len(row.tokens)

    def of_length(tokens: int) -> Side:
        engine = model.engine(tokens)
        chat = model.chat()

        def run(round_: int) -> int:
            sampling = SamplingParams(max_tokens=tokens, stop_token_ids=())
            samples = []
            for number in range(256):
                question = f"{model.prompt(round_, number)}\ngo"
                ids = chat.prompt([{"role": "user", "content": question}])
                samples.append(Sample(ids, 100000 * round_ + number))
            return sum(len(sample.tokens) for sample in engine.generate(samples, sampling))

        return run

    try:
        sides = {
            f"one turn, {length} tokens as in a row": of_length(length),
            f"one turn, {drawn} tokens as drawn": of_length(drawn),
            "four turns": ours.run,
        }
        return compare(sides, rounds)
    finally:
        ours.host.close()


def crowd(rounds: int) -> dict[str, Any]:
    """Return the memory while 1,024 trajectories wait and while they run."""
    ours = Trajectories(Model(), 1024, 4, 32)
    host, before = ours.host, memory_mib()
    for number in range(1024):
        host.open(number, (0, number), {"number": number})
    hear_all(host, 1024)
    begun = memory_mib()
    for number in range(1024):
        host.say(number, "a")
    hear_all(host, 1024)
    answered, processes = memory_mib(), len(descendants())
    for number in range(1024):
        host.end(number)

    most, has_ended = [before], threading.Event()

    def look() -> None:
        while not has_ended.wait(0.2):
            most.append(memory_mib())

    looks = threading.Thread(target=look)
    looks.start()
    ours.run(0)
    has_ended.set()
    looks.join()
    host.close()
    return {
        "processes": processes,
        "MiB before": round(before),
        "MiB begun": round(begun - before),
        "MiB answered": round(answered - before),
        "most MiB played": round(max(most) - before),
        "looks": len(most),
    }


def hear_all(host: Any, count: int) -> None:
    """Wait for a result of each environment."""
    while count:
        for _, answer in host.answers(1.0):
            assert "failed" not in answer, answer
            count -= 1


def hang(rounds: int) -> dict[str, Any]:
    """Run 256 trajectories, one of which hangs until its deadline."""
    model = Model()
    plain = Trajectories(model, 256, 4, 16, step_s=5.0)
    hung = Trajectories(model, 256, 4, 16, step_s=5.0, hangs=7)
    try:
        results = compare({"none hangs": plain.run, "one hangs": hung.run}, rounds)
        ended = {trajectory.ended for trajectory in hung.play(99)}
    finally:
        plain.host.close()
        hung.host.close()
    results["ended"] = sorted(ended)
    results["step_s"] = 5.0
    return results


def soak(rounds: int) -> dict[str, Any]:
    """Run 10,000 trajectories on one host; return what exists after each thousand."""
    ours = Trajectories(Model(), 1000, 2, 4, raises=50)
    results = []
    for round_ in range(10):
        ours.run(round_)
        results.append(
            {
                "trajectories": 1000 * (round_ + 1),
                "processes": len(descendants()),
                "handles": handles(),
                "MiB": round(memory_mib(), 1),
                "own MiB": round(memory_mib([os.getpid()]), 1),
            }
        )
    ours.host.close()
    return {"after": results, "processes in the end": len(descendants())}


def descendants() -> list[int]:
    """Return this process and all its descendants."""
    import psutil

    me = psutil.Process()
    return [me.pid, *(child.pid for child in me.children(recursive=True))]


def handles() -> int:
    """Count the open handles of this process and of those that start environments."""
    import psutil

    me = psutil.Process()
    lasting = [
        me,
        *me.children(),
        *(process for child in me.children() for process in child.children()),
    ]
    return sum(process.num_fds() for process in lasting)


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes, including those that have ended."""
    total = 0.0
    for pid in descendants():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def memory_mib(pids: list[int] | None = None) -> float:
    """Return the proportional set size of all processes, in MiB."""
    total = 0
    for pid in pids or descendants():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


PARTS = {"speed": speed, "overhead": overhead, "crowd": crowd, "hang": hang, "soak": soak}


def main() -> None:
    """Run the selected measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    keep_freed_memory()  # as in the processes of a run

    import torch

    torch.set_num_threads(1)
    results = {}
    for name in options.only.split(","):
        results[name] = PARTS[name](options.rounds)
        print(f"{name} is done", file=sys.stderr)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
