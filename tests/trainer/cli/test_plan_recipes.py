"""`verl-like plan` of recipes beside PPO, and as a page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.cli.test_plan import SIZES
from trainer.cli import plan
from trainer.detached.job import DetachedJob, DetachedPlacement
from trainer.planner.job import Job
from trainer.planner.page import parts_of
from trainer.planner.simulate import simulate
from trainer.planner.words import Plan
from verl_like.errors import ConfigError
from workers.memory import GIB, RoleMemory, pool_bytes

CARDS = ["plan.gpus=8", "plan.device=A100"]
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
    asked, keys = plan._parsed([*CARDS, *arguments], recipe)
    return plan._job(recipe, asked, keys)


def planned(recipe: str, *arguments: str) -> Plan:
    return Plan.of(job_of(recipe, *arguments))


def takes_what_its_run_counts(job: Job, found: Plan) -> bool:
    for placement in found.best:
        roles, _ = job.memory(placement)
        own = [pool.bytes for pool in placement.pools]
        if isinstance(placement, DetachedPlacement):
            own += own[1:] * (placement.setup.num_makers - 1)
        if sorted(own) != pytest.approx(sorted(pool_bytes(roles).values()), rel=0.01):
            return False
    return True


@pytest.mark.parametrize("recipe", ["sft", "reward-model", "dpo"])
def test_a_recipe_on_rows_has_the_five_fastest_layouts_of_its_model(
    model: Path, recipe: str
) -> None:
    found = planned(recipe, f"model.path={model}", "data.train_batch_size=512")
    assert len(found.best) == 5
    assert [each.step for each in found.best] == sorted(each.step for each in found.best)
    assert all(found.job.why_refused(placement) is None for placement in found.best)
    assert takes_what_its_run_counts(found.job, found)
    assert found.losers


def test_passes_are_cut_by_rows_where_the_run_cuts_them_so(model: Path) -> None:
    found = planned(
        "sft", f"model.path={model}", "data.use_dynamic_bsz=false", "data.train_batch_size=512"
    )
    key = "data.micro_batch_size_per_gpu"
    assert any(key in option.keys for option in found.job.tried("sft", 8))
    assert takes_what_its_run_counts(found.job, found)


def test_a_reference_of_its_own_stands_beside_the_model(model: Path) -> None:
    found = planned("dpo", f"model.path={model}", f"ref.model.path={model}")
    assert found.job.roles == ["preference", "ref"]
    assert takes_what_its_run_counts(found.job, found)


def test_experts_over_ranks_are_tried_where_a_model_has_some(tmp_path: Path, model: Path) -> None:
    experts = folder_of(tmp_path / "experts", EXPERTS)
    tried = planned("sft", f"model.path={experts}").job.tried("sft", 8)
    assert {"2", "4", "8"} <= {option.keys.get("parallel.ep") for option in tried}
    of_dense = planned("sft", f"model.path={model}").job.tried("sft", 8)
    assert all("parallel.ep" not in option.keys for option in of_dense)


def test_stages_are_tried_where_nothing_fits_without(model: Path) -> None:
    """Whole layers and long rows do not fit on a card; a stage's layers do."""
    keys = ["data.max_length=4096", "data.max_token_len_per_gpu=4096"]
    keys += [f"model.path={model}", "parallel.tp=1", "parallel.sp=1"]
    job = job_of("sft", *keys)
    assert all("parallel.pp" not in option.keys for option in job.options("sft", 8))
    least = job.least_bytes("sft", 8)
    assert least is not None
    gib = 0.97 * least / GIB + 4  # the reserve
    smaller = job_of("sft", *keys, f"plan.gib={gib:.3f}").options("sft", 8)
    assert smaller
    assert all(int(option.keys["parallel.pp"]) > 1 for option in smaller)


def detached(model: Path, *more: str) -> Plan:
    return planned(
        "detached",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=vllm",
        "algorithm=grpo",
        *more,
    )


def test_makers_and_trainers_of_a_detached_run_are_those_that_its_loader_accepts(
    model: Path,
) -> None:
    found = detached(model)
    assert isinstance(found.job, DetachedJob)
    assert takes_what_its_run_counts(found.job, found)
    for placement in found.best:
        assert isinstance(placement, DetachedPlacement)
        config = found.job.configured(placement)
        assert config.detached.trainers == placement.pools[0].cards
        assert config.detached.makers == placement.setup.num_makers
        assert placement.cards <= 8
        assert placement.step >= placement.at_least * 0.99


def test_a_wider_staleness_bound_makes_no_detached_run_slower(model: Path) -> None:
    best = detached(model).best[0]
    assert isinstance(best, DetachedPlacement)
    synchronous = replace(best.setup, max_staleness=0)
    assert best.step < simulate(best.phases, synchronous).seconds


def test_makers_that_the_user_has_set_stay(model: Path) -> None:
    found = detached(model, "detached.makers=2").best
    assert {each.setup.num_makers for each in found if isinstance(each, DetachedPlacement)} == {2}


def test_the_user_is_told_which_of_ppo_and_detached_is_faster(model: Path) -> None:
    keys = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm"]
    text = plan.plan([*CARDS, *keys, "algorithm=grpo"])
    said = re.search(r"As `verl-like detached`: ([\d.]+) s a step, ([\d.]+) times as (\w+)", text)
    assert said is not None
    ppo = planned("ppo", *keys, "algorithm=grpo").best[0].step
    ratio = float(said[1]) / ppo if said[3] == "slow" else ppo / float(said[1])
    assert float(said[2]) == pytest.approx(ratio, rel=0.05)
    why = plan.plan([*CARDS, *keys, "algorithm.adv_estimator=remax"])
    assert "As `verl-like detached` it cannot run: algorithm.adv_estimator=remax" in why


def test_a_page_has_the_tables_and_both_figures(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    text = plan.plan(["sft", *CARDS, f"model.path={model}", f"plan.html={file}"])
    page = file.read_text()
    assert page.count("<svg") == 2
    assert "Memory of a card: sft: weights" in page
    assert "Seconds of a step over cards: 1 cards" in page
    for line in text.splitlines():
        if line.startswith("  model.") or line.startswith("  placement="):
            assert line.strip() in page


def test_the_parts_of_a_card_add_up_to_its_memory() -> None:
    roles = [
        RoleMemory("actor", "pool", "", 8, 8, 16, 3, 20, host=20),
        RoleMemory("ref", "pool", "", 4, whole=2, activations=1),
    ]
    parts = parts_of(roles)
    assert sum(size for *_, size in parts) == pool_bytes(roles)["pool"]
    assert ("actor", "back from the host", 20) in parts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rm"], "plan rm: no such recipe. Did you mean 'reward-model'"),
        (["explain"], "plan explain: no such recipe"),
        (["best-of-n"], "plan best-of-n: it trains nothing"),
        (
            ["sft", "plan.rewards=3"],
            "says nothing of sft: it is read by ppo, detached",
        ),
        (["ppo", "plan.mean_length=3"], "it is read by sft, reward-model, dpo"),
        (["sft", "plan.mean_length=2000"], "plan.mean_length=2000 is above the longest row, 1024"),
        (["sft", "parallel.tp=16"], "does not divide key-value heads (8)"),
    ],
)
def test_bad_input_is_refused_in_words(model: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan.plan([*arguments, *CARDS, f"model.path={model}"])
    assert words in str(refused.value)


def test_scores_on_makers_are_not_planned(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"detached.score_on=maker is not planned"):
        detached(model, "detached.score_on=maker")
