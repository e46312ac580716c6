"""LoRA: only adapters learn, the engine gets base + adapter, the reference is the base."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.prompts import prompt_batch
from tests.workers.samples import (
    beside,
    learned,
    make_batch,
    own_chunk,
    started,
    tiny_config,
    weights_of,
)
from verl_like.errors import ConfigError
from workers.config import ModelConfig, OptimConfig, WorkersConfig
from workers.models.attention import log_once
from workers.models.causal_lm import ScalarHeadModel
from workers.models.load import load_model
from workers.models.lora import adapted_layers, add_adapter, merged_tensors, save_adapter
from workers.models.state import is_adapter
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.reference import ReferenceWorker
from workers.roles.rollout import RolloutWorker
from workers.training.engine import TrainEngine
from workers.training.microbatch import MicroBatchBudget
from workers.training.role_model_spec import RoleModelSpec
from workers.weights.full_weights import ModuleWriter

ROWS = 4


def lora_config(one_layer_dir: Path, **model: Any) -> WorkersConfig:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=ROWS, optim=OptimConfig(lr=1e-2))
    for section in (config.actor_rollout_ref.model, config.critic.model):
        section.lora_rank = 4
        for name, value in model.items():
            setattr(section, name, value)
    return config


def lora_actor(one_layer_dir: Path, **model: Any) -> ActorWorker:
    return started(ActorWorker, lora_config(one_layer_dir, **model), 10)


def plain_engine(path: Path) -> TrainEngine:
    """An engine without adapters."""
    engine = TrainEngine(RoleModelSpec("model.path", ModelConfig(path=str(path))))
    engine.build(ActorWorker(tiny_config(path)))
    return engine


def test_only_adapters_of_the_actor_are_trained(one_layer_dir: Path) -> None:
    actor = lora_actor(one_layer_dir)
    before = {name: tensor.clone() for name, tensor in actor.engine.module.named_parameters()}
    actor.update_actor(make_batch(ROWS))
    actor.update_actor(make_batch(ROWS, seed=1))
    for name, tensor in actor.engine.module.named_parameters():
        assert tensor.requires_grad == is_adapter(name), name
        assert tensor.equal(before[name]) != is_adapter(name), name
    num_states = sum(map(len, actor.engine.optimizer.state.values()))
    assert num_states == 3 * len(actor.engine.parameters())


def test_adapters_and_head_of_the_critic_are_trained(one_layer_dir: Path) -> None:
    critic = started(CriticWorker, lora_config(one_layer_dir), 10)
    for seed in range(2):
        critic.update_critic(make_batch(ROWS, seed))

    parameters = critic.engine.module.named_parameters()
    learning = [name for name, tensor in parameters if tensor.requires_grad]
    assert "score.weight" in learning
    assert all(is_adapter(name) or name == "score.weight" for name in learning)
    names = dict(load_model(critic.engine.model_config, "scalar").named_parameters())
    assert weights_of(critic).keys() == names.keys()


def test_merged_weights_score_like_the_adapters_at_every_version(
    tmp_path: Path,
) -> None:
    """GPT-2's layers are transposed."""
    build_tiny(tiny_model_config("gpt2")).save_pretrained(tmp_path / "model")
    actor, batch = lora_actor(tmp_path), make_batch(ROWS)
    copy = plain_engine(tmp_path / "model")
    assert copy.weights_checksum() == actor.weights_checksum()
    for version in range(2):
        actor.update_actor(make_batch(ROWS, seed=version))
        sink = ModuleWriter(copy.module)
        for name, tensor in actor.engine.named_full_tensors():
            sink.write_tensor(name, tensor)
        sink.verify("test")
        ours = actor.engine.forward_rows(batch, MicroBatchBudget(rows=ROWS))["log_probs"]
        merged = copy.forward_rows(batch, MicroBatchBudget(rows=ROWS))["log_probs"]
        torch.testing.assert_close(merged, ours, atol=1e-5, rtol=0)


def test_a_reference_next_to_the_actor_is_the_base_of_its_module(one_layer_dir: Path) -> None:
    config = lora_config(one_layer_dir)
    actor = started(ActorWorker, config, 10)
    batch = make_batch(ROWS)
    single = started(ReferenceWorker, config)
    expected = single.compute_ref_log_prob(batch).batch["ref_log_prob"]
    ref = beside(actor, ReferenceWorker, config)
    for seed in range(2):  # the reference runs first: it must not disable the adapters' gradients
        assert ref.compute_ref_log_prob(batch).batch["ref_log_prob"].equal(expected)
        actor.update_actor(make_batch(ROWS, seed))
    assert ref.engine.module is actor.engine.module
    assert ref.weights_checksum() == single.weights_checksum() != actor.weights_checksum()
    assert (actor.compute_log_prob(batch)[0].batch["old_log_probs"] - expected).abs().max() > 1e-3


def test_a_rollout_that_shares_the_module_samples_from_the_adapted_policy(
    one_layer_dir: Path,
) -> None:
    config = lora_config(one_layer_dir)
    actor = started(ActorWorker, config, 10)
    rollout = beside(actor, RolloutWorker, config)
    rollout.update_weights(0)
    before = rollout.generate_sequences(prompt_batch(ROWS))
    for seed in range(3):
        actor.update_actor(make_batch(ROWS, seed))
    rollout.update_weights(1)
    samples = rollout.generate_sequences(prompt_batch(ROWS))
    assert rollout.engine.module is actor.engine.module
    assert rollout.weights_checksum() == actor.weights_checksum()
    assert not samples.batch["rollout_log_probs"].equal(before.batch["rollout_log_probs"])
    scored = actor.compute_log_prob(samples)[0].batch["old_log_probs"]
    torch.testing.assert_close(samples.batch["rollout_log_probs"], scored, atol=1e-5, rtol=0)


def trained_adapters(one_layer_dir: Path) -> dict[str, Any]:
    config = lora_config(one_layer_dir)
    actor = started(ActorWorker, config, 10)
    batch = own_chunk(make_batch(ROWS), actor.rank, actor.world_size)
    reference = beside(actor, ReferenceWorker, config).compute_ref_log_prob(batch)
    metrics = [learned(actor.update_actor(batch)) for _ in range(3)]
    rollout = beside(actor, RolloutWorker, config)
    report = rollout.update_weights(0)
    return {
        "reference": reference.batch["ref_log_prob"],
        "log_probs": actor.compute_log_prob(batch)[0].batch["old_log_probs"],
        "metrics": metrics,
        "weights": weights_of(actor),
        "same": (report.error, rollout.weights_checksum() == actor.weights_checksum()),
    }


def test_two_shards_train_adapters_like_one_rank(one_layer_dir: Path) -> None:
    single, shards = trained_adapters(one_layer_dir), run_kept(2, trained_adapters, one_layer_dir)
    for name in ("reference", "log_probs"):
        together = torch.cat([shard[name] for shard in shards])
        torch.testing.assert_close(together, single[name], atol=1e-5, rtol=0)
    for shard in shards:
        assert shard["same"] == (None, True)
        for metrics, expected in zip(shard["metrics"], single["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for name, weight in single["weights"].items():
            assert (shard["weights"][name] - weight).norm() <= 1e-4 * weight.norm(), name


def test_target_modules_that_are_no_linear_layers_are_rejected(one_layer_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"target_modules=\['q_prj'\].*Did you mean 'q_proj'.*all-linear"
    ):
        lora_actor(one_layer_dir, target_modules=["q_prj"])
    with pytest.raises(ConfigError, match=r"target_modules=\[\]: no adapter fits: "):
        lora_actor(one_layer_dir, target_modules=[])
    with pytest.raises(ConfigError, match="model.embed_tokens, but only linear layers"):
        lora_actor(one_layer_dir, target_modules=["embed_tokens"])


MIXTURES = ("deepseek_v3", "gpt_oss", "qwen3_next")
OTHER_MIXTURES = (
    *("afmoe", "aria_text", "axk1", "axk2", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v32"),
    *("deepseek_v4", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe"),
    *("glm4_moe_lite", "glm_moe_dsa", "granitemoe", "granitemoe_swa", "granitemoehybrid"),
    *("granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling_text", "jetmoe"),
    *("kimi_linear", "lfm2_moe", "llama4_text", "mellum", "mimo_v2_flash", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe"),
    *("qwen4_exp_text", "solar_open", "zaya"),
)


@pytest.mark.parametrize(
    "case", [*MIXTURES, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHER_MIXTURES)]
)
def test_peft_loads_and_merges_all_linear_of_a_mixture_of_experts(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import PeftModel

    model_config, ids = ModelConfig(path="none", lora_rank=2), torch.arange(6, 12)[None]
    module = build_tiny(tiny_model_config(case))
    before = module(ids).logits
    log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        add_adapter(module, model_config)
    messages = [message for message in caplog.messages if "LoRA" in message]
    assert all(f"all-linear of {case} selects " in message for message in messages)
    adapter = [
        (name, parameter.detach().normal_(0, 0.1))
        for name, parameter in module.named_parameters()
        if is_adapter(name)
    ]
    logits = module(ids).logits
    assert (logits - before).abs().max() > 0.05

    save_adapter(tmp_path, module, model_config, adapter)
    loaded = PeftModel.from_pretrained(build_tiny(tiny_model_config(case)), tmp_path)
    torch.testing.assert_close(loaded(ids).logits, logits, atol=1e-4, rtol=0)
    merged = build_tiny(tiny_model_config(case))
    merged.load_state_dict(dict(merged_tensors(module, module.state_dict().items())))
    torch.testing.assert_close(merged(ids).logits, logits, atol=1e-3, rtol=0)
    loaded.merge_and_unload()
    torch.testing.assert_close(loaded(ids).logits, logits, atol=1e-3, rtol=0)


@pytest.mark.parametrize("target", ["all-linear", ["o_proj", "gate_proj", "down_proj"]])
def test_dense_layers_and_shared_experts_have_adapters(target: Any) -> None:
    module = build_tiny(tiny_model_config("deepseek_v3"))
    add_adapter(module, ModelConfig(path="none", lora_rank=2, target_modules=target))
    adapted = adapted_layers(module)
    assert "model.layers.0.mlp.gate_proj" in adapted, "the first layers are dense"
    assert "model.layers.3.mlp.shared_experts.down_proj" in adapted
    assert ("model.layers.3.mlp.shared_experts.up_proj" in adapted) == (target == "all-linear")
    assert not [name for name in adapted if ".experts" in name or name == "lm_head"]


def test_a_critic_of_a_mixture_of_experts_has_adapters_in_attention() -> None:
    module = ScalarHeadModel(build_tiny(tiny_model_config("mixtral")))
    add_adapter(module, ModelConfig(path="none", lora_rank=2))
    assert {name.rpartition(".")[2] for name in adapted_layers(module)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj")
    }
