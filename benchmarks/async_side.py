"""One measured run of asynchronous PPO, or of what it is compared with, in a separate process.

    python benchmarks/async_side.py make FOLDER [LAYERS [LAYERS OF THE CRITIC]]
    python benchmarks/async_side.py SIDE FOLDER local|ray STEPS [PROMPTS [WINDOW]]
    python benchmarks/async_side.py cluster

The script prints JSON; `bench_async.py` runs it. SIDE is a name in `SIDES`, and PROMPTS is the
number of prompts per step. `cluster` starts a Ray cluster and prints its address; the cluster ends
when its standard input is closed.

With WINDOW, the run pauses after every WINDOW steps: it prints their measurements, and continues
when it reads a line or exits at the end of input.

Policy and critic are Llamas of hidden size 64, by default with two layers each. After every token,
the model ends the response with a probability of 1/32, so lengths are geometric with a mean of 32
and a maximum of 256. With a learning rate of 1e-6 this does not change.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.async_training.step import AsyncTrainer
from trainer.ppo.stages import PPOTrainer
from trainer.record import Metrics
from verl_like import Dispatch, register
from verl_like.batch.protocol import DataProto
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker
from workers.weights.channel import SyncReport

NUM_PROMPTS, NUM_SAMPLES = 16, 4
MEAN_LENGTH, WIDTH = 32, 256
DELAY_S = 0.2
"""Duration of a slow send, and of a slow update."""
WARM_UP, LAST = 4, 5
"""Number of steps at the beginning and at the end of a run that are not counted."""
CPUS_OF_SIDES = 32
"""CPUs of the Ray cluster: all sides reserve some, although only one runs at a time."""
KINDS = {"main": "the step", "generator": "generators", "reward": "rewards", "ray": "Ray's own"}
"""Word in the name of a thread -> what the thread is for."""


class TrainerAlone(PPOTrainer):
    """A step without generation and weight sync."""

    ahead: deque[tuple[DataProto, Metrics]]

    def __init__(self, *args: Any) -> None:
        """Start without prepared batches."""
        super().__init__(*args)
        self.ahead = deque()

    def sample(self) -> tuple[DataProto, Metrics]:
        """Return a batch; from the second window on, one that was prepared before the pause."""
        return self.ahead.popleft() if self.ahead else super().sample()

    def draw_ahead(self, count: int) -> None:
        """Prepare this number of batches now."""
        self.ahead.extend(super(TrainerAlone, self).sample() for _ in range(count))

    def sync(self) -> Metrics:
        """Skip the sync: samples are from older weights, as in an asynchronous run."""
        self.weights.version += 1
        return {}


class GeneratorsAlone(AsyncTrainer):
    """Generates at full speed: samples are taken and discarded."""

    def step(self) -> Metrics:
        """Fetch a batch; without an update, the weights stay at one version."""
        self.generators.start()
        _, metrics = self.stage("gen", self.next_batch)
        return metrics


class SlowUpdate(AsyncTrainer):
    """Each update takes longer, without more computation."""

    def update(self, batch: DataProto) -> Metrics:
        """Run PPO's update, then sleep."""
        time.sleep(DELAY_S)
        return super().update(batch)


class SlowSend(RolloutWorker):
    """Samples are delayed before they are sent."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def take(self, max_tokens: int | None = None, seconds: float | None = None) -> DataProto | None:
        """Sleep, then return the engine's samples."""
        samples = super().take(max_tokens, seconds)
        time.sleep(DELAY_S)
        return samples


class SlowDelivery(ActorWorker):
    """Weights are delayed before a generator has them."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def deliver_weights(self, *arguments: Any) -> SyncReport:
        """Sleep, then deliver the published version."""
        time.sleep(DELAY_S)
        return super().deliver_weights(*arguments)


@dataclass(frozen=True)
class Side:
    """The settings of one side that differ from the common ones."""

    overrides: tuple[str, ...] = ()
    is_async: bool = True
    trainer: type[PPOTrainer] | None = None


TWO_POOLS = "trainer.n_gpus_per_node=2"
ROLLOUT_APART = ("placement=standalone", "role_mapping.critic=actor_pool", TWO_POOLS)
CRITIC_APART = ("role_mapping.critic=critic_pool", "resource_pool_spec.critic_pool=[1]")
SHORT = (
    "data.train_batch_size=4",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
SLOW_SAMPLES = (*SHORT, "role_workers.rollout=benchmarks.async_side.SlowSend")
SLOW_WEIGHTS = (*SHORT, "role_workers.actor=benchmarks.async_side.SlowDelivery")

SIDES = {
    "synchronous": Side(ROLLOUT_APART, is_async=False),
    "split": Side(("placement=split", TWO_POOLS), is_async=False),
    "staleness_0": Side(("async_training.max_staleness=0",)),
    "staleness_1": Side(("async_training.max_staleness=1",)),
    "critic_apart": Side(("async_training.max_staleness=1", *CRITIC_APART)),
    "staleness_4": Side(("async_training.max_staleness=4",)),
    "generators_alone": Side(("async_training.max_staleness=1",), trainer=GeneratorsAlone),
    "trainer_alone": Side(ROLLOUT_APART, is_async=False, trainer=TrainerAlone),
    "slow_samples_0": Side((*SLOW_SAMPLES, "async_training.max_staleness=0"), trainer=SlowUpdate),
    "slow_samples_1": Side((*SLOW_SAMPLES, "async_training.max_staleness=1"), trainer=SlowUpdate),
    "slow_weights_0": Side((*SLOW_WEIGHTS, "async_training.max_staleness=0"), trainer=SlowUpdate),
    "slow_weights_1": Side((*SLOW_WEIGHTS, "async_training.max_staleness=1"), trainer=SlowUpdate),
}


def cpu_by_kind() -> Counter[str]:
    """Return the CPU seconds that the threads of this process have used, by kind of thread."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    used: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name), "Ray's own")
        kind = next((word for word in KINDS if word in name.lower()), None)
        if kind is not None:
            with suppress(OSError):  # the thread has ended
                used[KINDS[kind]] += int((task / "schedstat").read_text().split()[0]) / 1e9
    used["others, and ended threads"] += time.process_time() - used.total()
    return used


class Enough(BaseException):
    """Raised when no more steps are requested."""


class Meter:
    """Records when each step ended, and the CPU seconds of this process by then."""

    def __init__(self, run_folder: str, window: int | None = None) -> None:
        """Start before the first step; with `window`, the run pauses after every `window` steps."""
        self._metrics = Path(run_folder) / "metrics.jsonl"
        self._window = window
        self.facts: dict[str, list[float]] = defaultdict(list)

    def on_step_end(self, trainer: Any, metrics: Metrics) -> None:
        """Called by the trainer."""
        if trainer.global_step in (WARM_UP, trainer.total_steps - LAST):
            for kind, seconds in cpu_by_kind().items():
                self.facts[f"cpu_s of {kind}"].append(seconds)
        self.facts["ended"].append(time.time())
        self.facts["cpu_s"].append(time.process_time())
        self.facts["length"].append(metrics.get("response_length/mean", 0.0))
        self.facts["staleness"].append(metrics.get("async/staleness/mean", 0.0))
        self.facts["score"].append(metrics.get("critic/score/mean", 0.0))
        if self._window is not None and trainer.global_step % self._window == 0:
            if isinstance(trainer, TrainerAlone):
                trainer.draw_ahead(self._window)
            print(json.dumps(self.facts), flush=True)
            self.facts.clear()
            if not sys.stdin.readline():
                raise Enough

    def on_train_end(self, trainer: Any) -> None:
        """Delete the metrics, because drawing a report would take longer than the steps."""
        self._metrics.unlink()


def make(folder: Path, num_layers: int = 2, critic_layers: int = 2) -> None:
    """Write a model that ends responses at random, prompts, and `letters` for `--only slow`."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    from trainer.cli.make_tiny import make as make_tiny
    from trainer.cli.make_tiny import make_model

    make_tiny(folder / "letters", num_train=60 * NUM_PROMPTS)
    make_tiny(folder, num_train=60 * NUM_PROMPTS, num_layers=num_layers)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    make_model(tokenizer, num_layers=critic_layers).save_pretrained(folder / "critic")
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    end = model.config.eos_token_id
    with torch.no_grad():
        # one hidden dimension is nearly constant; the logit of the end token is computed from it
        model.model.embed_tokens.weight[:, 0] = 0.5
        model.lm_head.weight[end] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[end, 0] = 1.0
        tokens = torch.randint(end + 1, model.config.vocab_size, (64, 32))
        logits = model(tokens).logits.flatten(0, 1)
        others = torch.cat([logits[:, :end], logits[:, end + 1 :]], dim=1).logsumexp(-1)
        wanted = others.mean() - torch.tensor(MEAN_LENGTH - 1.0).log()
        model.lm_head.weight[end, 0] = wanted / logits[:, end].mean()
    model.save_pretrained(folder / "model")


def overrides(folder: Path, run_folder: str, backend: str, steps: int, prompts: int) -> list[str]:
    """Return the settings of PPO with a critic and two mini-batches per step."""
    critic = folder / "critic"
    return [
        f"trainer.backend={backend}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        f"trainer.default_local_dir={run_folder}",
        f"trainer.total_training_steps={steps}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"critic.model.path={critic if critic.is_dir() else folder / 'model'}",
        f"data.train_files={folder}/train.parquet",
        "data.max_prompt_length=16",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "critic.optim.lr=1e-6",
        f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
        f"data.train_batch_size={prompts}",
        f"data.max_response_length={WIDTH}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 2}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "critic.ppo_micro_batch_size_per_gpu=64",
    ]


def measure(
    name: str, folder: Path, backend: str, steps: int, prompts: int, window: int | None = None
) -> dict[str, list[float]]:
    """Run this number of steps; return the measurements of `Meter` since the last window."""
    side = SIDES[name]
    with tempfile.TemporaryDirectory() as run_folder:
        settings = [*overrides(folder, run_folder, backend, steps, prompts), *side.overrides]
        config = load_config(settings, ASYNC) if side.is_async else load_config(settings)
        meter = Meter(run_folder, window)
        with suppress(Enough):
            run(config, side.trainer, callbacks=[meter])
    return meter.facts


def keep_cluster() -> None:
    """Run one Ray cluster for all sides, which run one after the other."""
    import ray

    from verl_like.backends.ray import connect

    connect(num_cpus=CPUS_OF_SIDES)
    print(json.dumps({"address": ray.get_runtime_context().gcs_address}), flush=True)
    sys.stdin.read()


def main() -> None:
    """Parse the command line, and run the benchmark."""
    if sys.argv[1] == "cluster":
        keep_cluster()
        return
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), *map(int, sys.argv[3:]))
        return
    name, folder, backend, *sizes = sys.argv[1:]
    steps, *rest = map(int, sizes)
    prompts = rest[0] if rest else NUM_PROMPTS
    window = rest[1] if len(rest) > 1 else None
    print(json.dumps(measure(name, Path(folder), backend, steps, prompts, window)), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
