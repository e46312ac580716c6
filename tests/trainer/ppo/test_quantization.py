"""Quantized roles: their correction, errors, memory and metrics."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.conftest import load as load_file
from tests.integration.runs import FEW_ROWS, calls, lines, overrides
from trainer import load_config, run
from trainer.cli.check import explain
from trainer.ppo.config import PPOConfig
from trainer.ppo.memory import role_memories
from trainer.ppo.preparation import check_models
from trainer.ppo.recipe import needs_correction
from trainer.ppo.scoring import reference_drift
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError

CURVES = load_file("docs/make_curves.py")
NEEDED = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model")
ROLLOUT = "actor_rollout_ref.rollout.quantization=int8"
REF = "actor_rollout_ref.ref.quantization=int8"
KL = "actor_rollout_ref.actor.use_kl_loss=true"
KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
DRIFT = "ref/quantization_log_prob_diff_mean"


def load(*settings: str) -> PPOConfig:
    return load_config([*NEEDED, *settings])


def test_quantized_rollouts_are_corrected_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        correction = load(ROLLOUT).algorithm.rollout_correction
    assert correction == load("correction=decoupled_token_is").algorithm.rollout_correction
    assert "rollout.quantization=int8 rounds the rollout's weights, so" in caplog.text
    assert "correction=disabled turns it off" in caplog.text
    caplog.clear()
    assert load(REF, KL).algorithm.rollout_correction.rollout_is is None
    assert "rollout_correction" not in caplog.text


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("correction=disabled", None),
        ("correction=decoupled_seq_is", "sequence"),
        ("algorithm.rollout_correction.rollout_is=null", None),
        ("algorithm.rollout_correction.rollout_is=geometric", "geometric"),
        ("algorithm.rollout_correction={rollout_token_veto_threshold: 1e-4}", None),
    ],
)
def test_a_users_correction_is_kept(
    setting: str, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(ROLLOUT, setting).algorithm.rollout_correction.rollout_is == expected
    assert "rounds the rollout's weights" not in caplog.text


VLLM = "actor_rollout_ref.rollout.name=vllm"
FP8 = "actor_rollout_ref.rollout.quantization=fp8"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ((VLLM, FP8, "trainer.simulate=1xH100"), "rollout.quantization=fp8 rounds the rollout's"),
        ((VLLM, f"{KWARGS}.quantization=fp8"), "engine_kwargs.quantization=fp8"),
    ],
)
def test_an_fp8_rollout_is_corrected(settings: tuple[str, ...], reason: str) -> None:
    config = load(*settings)
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert reason in needs_correction(config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((ROLLOUT, VLLM), "int8 with .*rollout.name=vllm: vllm supports fp8"),
        ((FP8, "actor_rollout_ref.rollout.name=native"), "fp8 with .*rollout.name=native"),
        (
            (FP8, VLLM, "trainer.device=cpu"),
            r"dtype=None on cpu is not bfloat16. Set actor_rollout_ref.rollout.dtype=bfloat16",
        ),
        (
            (FP8, VLLM, "actor_rollout_ref.rollout.dtype=float32", "trainer.simulate=1xH100"),
            "rollout.dtype=float32 on cuda is not bfloat16",
        ),
        (
            (FP8, VLLM, f"{KWARGS}.quantization=fp8", "trainer.simulate=1xH100"),
            "vLLM accepts only one",
        ),
        (("actor_rollout_ref.rollout.quantization=int4",), "choose int8 or fp8"),
        (
            (ROLLOUT, "trainer.device=cuda"),
            "only on CPUs.*device is cuda.*rollout.quantization=fp8",
        ),
        ((REF, KL, "actor_rollout_ref.ref.update_every=3"), "an int8 reference cannot be updated"),
        (
            (REF, KL, "actor_rollout_ref.ref.fsdp_config.fsdp_size=2"),
            r"fsdp_size=2\. Set \S+ to 1, or leave out the quant",
        ),
        ((REF, KL, "actor_rollout_ref.ref.fsdp_config.param_offload=true"), "param_offload=true"),
        ((REF, KL, "actor_rollout_ref.model.lora_rank=4"), "the actor's module"),
        (
            (
                "distillation.teacher_model.model_path=teacher",
                "distillation.teacher_model.quantization=int8",
                "distillation.teacher_model.fsdp_config.fsdp_size=2",
            ),
            "distillation.teacher_model.fsdp_config.fsdp_size=2",
        ),
    ],
)
def test_impossible_quantization_is_rejected(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(*settings)


def test_a_lora_reference_in_another_pool_may_be_int8() -> None:
    more = ("placement=standalone", "trainer.n_gpus_per_node=4", "trainer.device=cpu")
    load(REF, KL, "actor_rollout_ref.model.lora_rank=4", *more)


def test_memory_plan_and_explain_show_int8(tiny_dir: Path, tmp_path: Path) -> None:
    settings = ("trainer.n_gpus_per_node=2", "trainer.device=cpu", "placement=colocate", KL)
    plain, small = (
        load_config(overrides(tiny_dir, tmp_path, *settings, *int8))
        for int8 in ((), (ROLLOUT, REF))
    )
    before, after = ({m.role: m for m in role_memories(c, "cpu")} for c in (plain, small))
    assert before["actor"] == after["actor"]
    # shards on two ranks before, the whole model as int8 after
    whole = 2 * before["ref"].weights
    assert 0.25 * whole < after["ref"].weights == after["rollout"].weights < 0.7 * whole
    assert (after["ref"].types, after["rollout"].types) == ("int8 / float32", "int8 / float32")
    assert after["ref"].gathered == 0
    assert "int8 / float32" in explain(small)


def test_drift_is_the_mean_gap_of_tokens_in_step_1() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    columns = {
        "response_mask": mask,
        "ref_log_prob": torch.tensor([[-1.0, -2.0, 9.0], [-3.0, 9.0, 9.0]]),
        "old_log_probs": torch.tensor([[-1.5, -2.0, 0.0], [-2.0, 0.0, 0.0]]),
    }
    batch = DataProto.from_dict(columns)
    config = load(REF, KL)
    assert reference_drift(batch, config, 1) == {DRIFT: pytest.approx(0.5)}
    assert reference_drift(batch, config, 2) == {}
    assert reference_drift(batch, load(KL), 1) == {}


TWO_STEPS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "trainer.backend=local",
    "trainer.total_training_steps=2",
    *FEW_ROWS,
    *(REF, KL),
)


def test_an_int8_run_logs_its_gaps(tiny_dir: Path, tmp_path: Path) -> None:
    run(load_config(overrides(tiny_dir, tmp_path, *TWO_STEPS, ROLLOUT)))
    first, second = lines(tmp_path)
    assert 0 < first[DRIFT] < 0.02
    assert DRIFT not in second
    for line in (first, second):
        assert 0 < line["training/rollout_probs_diff_mean"] < 0.01
        assert line["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.02)
        assert line["rollout_corr/rollout_is_max"] > 1


def test_drift_needs_old_log_probs_only_in_step_1(tiny_dir: Path, tmp_path: Path) -> None:
    run(load_config(overrides(tiny_dir, tmp_path, *TWO_STEPS)))
    first, second = lines(tmp_path)
    assert len(calls(tmp_path, "compute_log_prob")) == 1
    assert 0 < first[DRIFT] < 0.02
    assert DRIFT not in second


@pytest.mark.slow
def test_an_int8_rollout_learns_the_tiny_task(tiny_dir: Path, tmp_path: Path) -> None:
    scores = CURVES.train(["algorithm=grpo", ROLLOUT], tiny_dir, tmp_path)
    first, last = CURVES.first_and_last(scores)
    assert last > first + CURVES.LEAST_RISE, scores
    assert all("rollout_corr/rollout_is_mean" in line for line in lines(tmp_path))


@pytest.mark.parametrize("settings", [(ROLLOUT,), (REF, KL)])
def test_models_without_linear_layers_fail(settings: tuple[str, ...], tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    model.save_pretrained(tmp_path)
    config = load(*settings, f"actor_rollout_ref.model.path={tmp_path}", "algorithm=grpo")
    with pytest.raises(ConfigError, match="int8: a model of type 'gpt2' has no linear layers"):
        check_models(config)
