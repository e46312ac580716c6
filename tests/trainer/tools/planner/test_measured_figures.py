"""The planner's predictions and what an H100 measured (`trainer/tools/planner/measured.json`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import load
from trainer.cli.plan import job_of
from trainer.tools.planner.cost import DEVICES, Gpus, ModelCost, StepRows, measured_on, pass_seconds
from trainer.tools.planner.records import record_tokens, sampler_seconds
from workers.config import ModelConfig
from workers.parallel.sharding import ParallelDims
from workers.training.role_model_spec import RoleModelSpec

MAX_OFF = 0.25
ONE = Gpus(DEVICES["H100"], 1, 8)
RATES = DEVICES["H100"].rates
OFF = {
    "update of 0.5B, 8 rows, eager": (0.5, "the host starts operations with gradients slowly"),
    "its update": (0.61, "measured with an eager head"),
    "its generation, native engine": (0.62, "22 ms per token, where decoding alone took 13"),
    "step of GRPO of 0.5B, 64 x 4 rows": (0.62, "its generation"),
    "step of GRPO of 0.5B, 64 x 4 rows, eager": (0.55, "its generation"),
    "step of PPO of 0.5B, 64 x 4 rows": (0.7, "its generation"),
    "sampling of 256 rows, top-k": (0.52, "topk reads its input several times"),
    "sampling of 256 rows, plain": (0.75, "measured in four parts of 64 rows"),
}
"""Figure -> its ratio of predicted to measured, and why it is off by more than a quarter."""
NOT_PLANNED = "log-probs of 1,024 positions", "log-probs and gradients", "AdamW step", "gradient"
"""Beginnings of figures that a plan contains only as a part of passes and optimizer steps."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for size in ("0.5b", "1.5b"):
        load("benchmarks/gpu_models.py").config_of(size).save_pretrained(folder / size)
    return folder


def call(
    model: Path, rows: StepRows, trains: bool, compiled: bool = False, tokens: int = 16384
) -> float:
    """Return the seconds of an update of all layers recomputed, or of a pass for log-probs."""
    config = ModelConfig(path=str(model), compile="on" if compiled else "off")
    cost = ModelCost.of(RoleModelSpec("model.path", config, trains=True), rows, ONE)
    dims = ParallelDims()
    return pass_seconds(cost, rows, dims, tokens, ONE, trains=trains, recomputed=28)


@functools.cache
def step(model: Path, algorithm: str, eager: bool) -> dict[str, float]:
    """Return the seconds of the stages of a step of the run that `gpu.sh` measured."""
    job = job_of([
        "--gpus=1xH100", "--mean-prompt=384", "--mean-response=510", f"algorithm={algorithm}",
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        f"actor_rollout_ref.model.compile={'off' if eager else 'on'}",
        "actor_rollout_ref.rollout.n=4", "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
        "data.max_prompt_length=512", "data.max_response_length=512",
    ])  # fmt: skip
    best = job.best(1)[0]
    return {"step": best.step, **dict(zip(job.stages, best.seconds, strict=True))}


def predictions(models: Path) -> dict[str, Callable[[], float]]:
    large, small = models / "1.5b", models / "0.5b"
    rows, eight, groups = (
        StepRows(32, 32, 256, [768]),
        StepRows(8, 8, 256, [768]),
        StepRows(32, 4, 1024, [512]),
    )

    def token(num_rows: int) -> float:
        tokens = record_tokens(ModelConfig(path=str(small)), 128, RATES).at("token", 24, num_rows)
        return 1e3 * max(tokens.device, tokens.host)

    def sampled(**settings: float) -> float:
        return 1e3 * 256 * sampler_seconds(151936, RATES, **settings)

    return {
        "update of 1.5B, 32,768 tokens, eager": lambda: call(large, rows, True),
        "the same, compiled, with an eager head": lambda: call(large, rows, True, compiled=True),
        "log-probs of 1.5B, 32,768 tokens": lambda: call(large, rows, False),
        "update of 0.5B, 8 rows, eager": lambda: call(small, eight, True, tokens=4096),
        "4 prompts of 1.5B x 8 rows, each row alone": lambda: call(large, groups, True),
        "the same, prefixes shared": lambda: call(large, groups, True),
        "step of GRPO of 0.5B, 64 x 4 rows": lambda: step(small, "grpo", False)["step"],
        "its update": lambda: step(small, "grpo", False)["update"],
        "its generation, native engine": lambda: step(small, "grpo", False)["sample"],
        "step of GRPO of 0.5B, 64 x 4 rows, eager": lambda: step(small, "grpo", True)["step"],
        "step of PPO of 0.5B, 64 x 4 rows": lambda: step(small, "ppo", True)["step"],
        "its updates of actor and critic": lambda: step(small, "ppo", True)["update"],
        "token of 0.5B, native engine, 64 rows": lambda: token(64),
        "token of 0.5B, native engine, 256 rows": lambda: token(256),
        "sampling of 256 rows, plain": sampled,
        "sampling of 256 rows, top-k": lambda: sampled(top_k=50),
        "sampling of 256 rows, min-p": lambda: sampled(min_p=0.05),
        "sampling of 256 rows, top-p": lambda: sampled(top_p=0.9),
    }


@pytest.mark.long
def test_measured_figures_are_predicted_within_a_quarter_or_explained(models: Path) -> None:
    figures = [row for row in measured_on("H100") if not row["name"].startswith(NOT_PLANNED)]
    predicted = predictions(models)
    ratios = {row["name"]: predicted[row["name"]]() / row["measured"] for row in figures}
    expected = {name: OFF[name][0] if name in OFF else 1.0 for name in ratios}
    allowed = {name: 0.02 if name in OFF else MAX_OFF for name in ratios}
    assert not {
        name: ratio for name, ratio in ratios.items() if abs(ratio - expected[name]) > allowed[name]
    }
