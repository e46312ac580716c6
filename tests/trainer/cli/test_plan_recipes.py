"""`verl-like plan` of recipes other than PPO."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.cli.test_plan import SIZES
from trainer.cli import plan
from trainer.tools.planner.async_training import AsyncPlacement
from trainer.tools.planner.job import Job
from trainer.tools.planner.search import PlannedPlacement
from trainer.tools.planner.text import plan_text, split_valid
from verl_like.errors import ConfigError
from workers.memory import GIB, pool_bytes

GPUS = ["--gpus=8", "--device=A100"]
EXPERTS = {
    **SIZES,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "head_dim": 32,
}


def folder_of(folder: Path, sizes: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("model"), SIZES)


def job_of(recipe: str, *arguments: str) -> Job:
    return plan.job_of([recipe, *GPUS, *arguments])


def planned(recipe: str, *arguments: str) -> tuple[Job, list[PlannedPlacement]]:
    """Return the job and the placements that are shown."""
    job = job_of(recipe, *arguments)
    best, _ = split_valid(job, job.best(8))
    return job, best


def counts_the_bytes_of_its_run(job: Job, best: list[PlannedPlacement]) -> bool:
    for placement in best:
        roles = job.memories(job.configured(placement))
        planned = [pool.bytes for pool in placement.pools]
        if isinstance(placement, AsyncPlacement):
            planned += planned[1:] * (placement.num_generators - 1)
        if sorted(planned) != pytest.approx(sorted(pool_bytes(roles).values()), rel=0.01):
            return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_rows_recipes_have_their_five_fastest_layouts(model: Path, recipe: str) -> None:
    keys = f"model.path={model}", "data.train_batch_size=512"
    job, best = planned(recipe, *keys)
    assert len(best) == 5
    assert [placement.step for placement in best] == sorted(placement.step for placement in best)
    assert counts_the_bytes_of_its_run(job, best)
    if recipe == "sft":
        assert "Slower than layout 1:" in plan_text(job)


def test_passes_are_cut_by_rows_in_plan_and_run(model: Path) -> None:
    job, best = planned(
        "sft", f"model.path={model}", "data.use_dynamic_bsz=false", "data.train_batch_size=512"
    )
    key = "data.micro_batch_size_per_gpu"
    assert any(key in layout.keys for layout in job.layouts("sft", 8))
    assert counts_the_bytes_of_its_run(job, best)


def test_a_separate_reference_is_placed_next_to_the_model(model: Path) -> None:
    job, best = planned("dpo", f"model.path={model}", f"ref.model.path={model}")
    assert job.roles == ["preference", "ref"]
    assert counts_the_bytes_of_its_run(job, best)


@pytest.mark.long
def test_expert_parallelism_is_tried_only_with_experts(tmp_path: Path, model: Path) -> None:
    experts = folder_of(tmp_path / "experts", EXPERTS)
    layouts = job_of("sft", f"model.path={experts}").layouts("sft", 8)
    assert {"2", "4", "8"} <= {layout.keys.get("parallel.ep") for layout in layouts}
    dense_layouts = job_of("sft", f"model.path={model}").layouts("sft", 8)
    assert all("parallel.ep" not in layout.keys for layout in dense_layouts)


@pytest.mark.long
def test_pipeline_stages_are_tried_only_if_nothing_else_fits(model: Path) -> None:
    """Whole layers and long rows do not fit on a GPU; a stage's layers do."""
    keys = ["data.max_length=4096", "data.max_token_len_per_gpu=4096"]
    keys += [f"model.path={model}", "parallel.tp=1", "parallel.sp=1"]
    job = job_of("sft", *keys)
    layouts = job.layouts("sft", 8)
    assert all("parallel.pp" not in layout.keys for layout in layouts)
    least = min(layout.memory.resident + layout.memory.call for layout in layouts)
    gib = 0.97 * least / GIB + 4  # the reserve
    job = job_of("sft", *keys, f"--memory-gib={gib:.3f}")
    smaller = [layout for layout in job.layouts("sft", 8) if job.fits(layout)]
    assert smaller
    assert all(int(layout.keys["parallel.pp"]) > 1 for layout in smaller)


def async_plan(model: Path, *settings: str) -> tuple[Job, list[PlannedPlacement]]:
    return planned(
        "async",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=vllm",
        "algorithm=grpo",
        *settings,
    )


@pytest.mark.long
def test_a_run_accepts_async_plans(model: Path) -> None:
    job, best = async_plan(model)
    assert counts_the_bytes_of_its_run(job, best)
    for placement in best:
        assert isinstance(placement, AsyncPlacement)
        config = job.configured(placement)
        assert config.async_training.trainers == placement.pools[0].gpus
        assert config.async_training.generators == placement.num_generators
        assert placement.gpus <= 8
        generator, *trainer = placement.seconds[:-1]
        assert placement.step >= max(generator, sum(trainer)) * 0.99


@pytest.mark.long
def test_the_number_of_generators_may_be_set(model: Path) -> None:
    _, best = async_plan(model, "async_training.generators=2")
    assert {
        placement.num_generators for placement in best if isinstance(placement, AsyncPlacement)
    } == {2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reward"], "plan reward: there is no such recipe. Did you mean 'reward-model'"),
        (["sft", "--reward-s=3"], "--reward-s does not apply to sft; only ppo, async use it"),
        (["sft", "--mean-length=2000"], "--mean-length=2000 is above the longest row=1024"),
    ],
)
def test_bad_input_is_rejected(model: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan.plan([*arguments, *GPUS, f"model.path={model}"])
    assert words in str(caught.value)


@pytest.mark.long
def test_a_role_without_a_possible_layout_is_named(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    model, rows = folder_of(tmp_path, {**SIZES, **heads}), "data.train_batch_size=512"
    with pytest.raises(ConfigError, match=r"sft: no layout is possible \(512 rows, 8 GPUs per"):
        plan.plan(["sft", *GPUS, f"model.path={model}", rows, "parallel.tp=16"])
