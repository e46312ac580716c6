"""`verl-like plan` places roles on GPUs that this machine lacks, from only a config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainer import PPOTrainer
from trainer.cli import plan
from trainer.config.settings import overrides_of
from trainer.ppo.memory import role_memories
from trainer.ppo.recipe import load_config
from trainer.tools.planner.job import cluster_keys
from trainer.tools.planner.ppo import PPOJob
from trainer.tools.planner.search import PlannedPlacement
from trainer.tools.planner.text import MAX_SHOWN, plan_text, split_valid, three_digits
from verl_like.errors import ConfigError
from workers.memory import pool_bytes

SIZES = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the settings of a PPO run whose model is a config.json."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SIZES))
    return [
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.rollout.name=vllm",
        "algorithm.use_kl_in_reward=true",
    ]


GPUS = ["--gpus=16", "--device=A100"]
TWO_ROLES = [
    *("algorithm=grpo", "algorithm.use_kl_in_reward=false"),
    "actor_rollout_ref.actor.use_kl_loss=false",
]
"""Actor and rollout, which have few placements."""


@pytest.fixture(scope="module")
def planned(settings: list[str]) -> tuple[PPOJob, list[PlannedPlacement]]:
    job = plan.job_of([*GPUS, *settings])
    assert isinstance(job, PPOJob)
    return job, job.best(16)


@pytest.mark.long
def test_a_run_accepts_a_plan_and_counts_its_bytes(
    settings: list[str], planned: tuple[PPOJob, list[PlannedPlacement]]
) -> None:
    lora = plan.job_of([*GPUS, *settings, *TWO_ROLES, "actor_rollout_ref.model.lora_rank=32"])
    for job, placements, most in ((*planned, 15), (lora, lora.best(16), 2)):
        partitions = {frozenset(tuple(pool.roles) for pool in p.pools) for p in placements}
        assert len(partitions) == len(placements) <= most
        best, _ = split_valid(job, placements)
        assert len(best) == min(MAX_SHOWN, most)
        for placement in best:
            cluster = cluster_keys(job.device, 16, 8)
            config = load_config([*job.settings, *overrides_of(cluster), *job.overrides(placement)])
            expected = pool_bytes(role_memories(config, "cuda", job.device.bytes))
            counted = [pool.bytes for pool in placement.pools]
            assert sorted(counted) == pytest.approx(sorted(expected.values()), rel=0.01)


@pytest.mark.long
def test_the_text_has_keys_slower_placements_and_hours(
    settings: list[str], planned: tuple[PPOJob, list[PlannedPlacement]]
) -> None:
    text = plan.plan([*GPUS, *settings, "trainer.total_training_steps=7200"])
    hours = three_digits(2 * planned[1][0].step)
    assert f"the run of 7,200 steps takes {hours} hours." in text
    for part in (
        "GPUs: 16 x A100, 8 per node\nStep: 1,024 prompts x 1 sample, prompt + response of 256",
        "mini-batches of 64 prompts",
        "Seconds are predicted, not measured: the operations of the model's class",
        "Nothing was ever measured on this GPU (A100).",
        "Slower than placement 1:",
        "Next: check a run with your settings and the keys of placement 1, and your files instead",
        f"verl-like check ppo --full --gpus 16xA100 \\\n    {settings[0]} \\\n",
        "data.train_files=rows.parquet \\\n    trainer.nnodes=2 \\\n",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00"),
        (0.004, "<0.01"),
        (0.25, "0.25"),
        (5.944, "5.94"),
        (9.997, "10.0"),
        (14.06, "14.1"),
        (99.97, "100"),
        (1234.5, "1,234"),
    ],
)
def test_seconds_have_three_significant_digits(seconds: float, text: str) -> None:
    assert three_digits(seconds) == text


def test_a_rejected_placement_is_not_listed_as_slower(
    planned: tuple[PPOJob, list[PlannedPlacement]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, placements = planned
    last = placements[-1].summary
    monkeypatch.setattr(PPOJob, "rejection", lambda _, p: None if p.summary == last else "an error")
    text = plan_text(job)
    assert "Placements that a run rejects:\n" in text
    assert text.count(": an error") == min(MAX_SHOWN, len(placements) - 1)
    assert "Slower than" not in text


@pytest.mark.long
def test_settings_of_the_user_are_not_planned(settings: list[str]) -> None:
    job = plan.job_of([*GPUS, *settings, "actor_rollout_ref.actor.parallel.tp=2"])
    key = "actor_rollout_ref.actor.parallel.tp"
    assert all(key not in layout.keys for layout in job.layouts("actor", 8))
    free = plan.job_of([*GPUS, *settings])
    assert {"2", "4"} <= {layout.keys.get(key) for layout in free.layouts("actor", 8)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device=H100"], "--gpus is missing"),
        (["--gpus=8"], "--device is missing"),
        (["--gpus=0", "--device=H100"], "--gpus=0: use a number from 1 to 4,096"),
        (["--gpus=8", "--device=H1000"], "is not a known GPU. Did you mean 'H100'"),
        ([*GPUS, "placement=split"], "placement: the plan chooses where roles run; leave the key"),
        ([*GPUS, "--mean-response=600"], "above data.max_response_length=512"),
    ],
)
def test_bad_input_is_rejected(settings: list[str], arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan.plan([*arguments, *settings])
    assert words in str(caught.value)


def test_a_model_without_a_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.json there"):
        plan.plan([*GPUS, f"actor_rollout_ref.model.path={tmp_path}"])


def test_a_model_that_fits_nowhere_gets_the_number_of_gpus_it_needs(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"actor: \d+, .* (\d+) of these GPUs are enough"):
        plan.plan(["--gpus=1", "--device=H100", "--memory-gib=18", *settings, *TWO_ROLES])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["actor_rollout_ref.rollout.name=native"],
            r"rollout\.name=vllm, a smaller actor_rollout_ref\.rollout\.kv_cache_gib\.",
        ),
        (
            ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.dtype=bfloat16"],
            r"either\. Alternatives: larger GPUs, shorter rows\.$",
        ),
    ],
    ids=["native engine", "keys that are set"],
)
def test_a_plan_that_does_not_fit_has_alternatives(
    settings: list[str], keys: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer.tools.planner.text.MAX_GPUS", 1
    )  # skips the search for enough GPUs
    with pytest.raises(ConfigError, match=words):
        plan.plan(["--gpus=1", "--device=H100", "--memory-gib=6", *settings, *TWO_ROLES, *keys])


def test_the_plan_counts_every_call_of_a_step_on_rows(settings: list[str]) -> None:
    path = settings[0].removeprefix("actor_rollout_ref.")
    calls = {}
    for loss in ("dpo", "kto"):
        job = plan.job_of(["dpo", "--gpus=8", "--device=H100", path, f"loss={loss}"])
        calls[loss] = job.calls("preference")
    assert calls["dpo"] == [("update", "update_model")]
    assert calls["kto"] == [("update", "compute_log_prob"), *calls["dpo"]]


class ReadsAgain(PPOTrainer):
    """Computes log-probs where PPO only computes advantages."""

    def estimate(self, batch: Any) -> Any:
        self.call("actor", "compute_log_prob", batch).get()
        return super().estimate(batch)


def test_the_plan_counts_calls_of_overridden_stages(settings: list[str]) -> None:
    job = plan.job_of([*GPUS, *settings, f"trainer.cls={__name__}.ReadsAgain"])
    assert job.calls("actor") == [
        *(("score", "compute_log_prob"), ("update", "compute_log_prob")),
        ("update", "update_actor"),
    ]


def test_the_plan_counts_the_update_of_a_run_with_ptx_rows(settings: list[str]) -> None:
    job = plan.job_of([*GPUS, *settings, "ptx.train_files=x"])
    assert ("update", "update_actor") in job.calls("actor")


class Fails(PPOTrainer):
    """Needs a column that no worker writes."""

    def estimate(self, batch: Any) -> Any:
        return batch.select(["mine"])


def fails(token_level_rewards: Any, mine: Any, **_: Any) -> Any:
    """An estimator of a column that no worker declares."""


@pytest.mark.long
def test_a_plan_says_whose_calls_it_has_if_the_user_s_class_fails_on_stubs(
    settings: list[str],
) -> None:
    job = plan.job_of([*GPUS, *settings, *TWO_ROLES, f"trainer.cls={__name__}.Fails"])
    assert ("update", "update_actor") in job.calls("actor")
    assert re.search(r"note: the step of Fails failed on stubs .*'mine'", plan_text(job))


def test_an_estimator_that_fails_on_stubs_ends_the_plan(settings: list[str]) -> None:
    job = plan.job_of([*GPUS, *settings, f"algorithm.adv_estimator={__name__}.fails"])
    with pytest.raises(ConfigError, match=r"in your code, .*test_plan\.fails .*Plan with"):
        job.calls("actor")


def test_passes_of_a_number_of_samples_have_their_mean_tokens(settings: list[str]) -> None:
    by_samples = [
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=3",
    ]
    job = plan.job_of([*GPUS, *settings, *by_samples])
    mean = job.rows("actor").tokens
    assert job.pass_tokens(job.config, job.models["actor"], "actor", "update_actor") == round(mean)
    assert job.pass_tokens(job.config, job.models["ref"], "ref", "compute_log_prob") == round(
        3 * mean
    )
    by_tokens = plan.job_of([*GPUS, *settings])
    assert (
        by_tokens.pass_tokens(by_tokens.config, by_tokens.models["actor"], "actor", "update_actor")
        == 16384
    )
