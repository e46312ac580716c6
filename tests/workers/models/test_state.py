"""All state counts as weights: buffers are loaded, sharded, sent, saved and exported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.workers.kept_ranks import run_kept
from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.samples import PROMPT, beside, make_batch, own_chunk, started, tiny_config
from verl_like.errors import ConfigError, WeightSyncError
from workers.models.load import load_model
from workers.models.state import named_state, persistent_buffers
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.rollout import RolloutWorker
from workers.rollout.vllm.setup import expected_weights
from workers.training.microbatch import MicroBatchBudget
from workers.weights.full_weights import ModuleWriter

ROUTER_BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"
"""A buffer of `deepseek_v3`."""


def save_model(folder: Path, family: str) -> Path:
    """Save a tiny model whose buffers affect its results in `folder`/model."""
    build_tiny(tiny_model_config(family)).save_pretrained(folder / "model")
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the entries of the folder's one file of weights."""
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def plain_log_probs(model_folder: Path) -> Tensor:
    """Return transformers' log-probs of the batch's responses, row by row without padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    batch = make_batch(6).batch
    log_probs = torch.zeros(batch["responses"].shape)
    for row, mask in enumerate(batch["attention_mask"]):
        real = batch["input_ids"][row, mask != 0][None]
        with torch.no_grad():
            scores = model(real).logits[0, :-1].log_softmax(-1)
        count = int(mask[PROMPT:].sum())
        log_probs[row, :count] = scores.gather(1, real[0, 1:, None])[-count:, 0]
    return log_probs


def buffers_of(module: Any) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in persistent_buffers(module)}


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4_text"])
def test_buffers_are_loaded_sent_and_exported(family: str, tmp_path: Path) -> None:
    config = tiny_config(save_model(tmp_path, family), use_dynamic_bsz=False)
    config.actor_rollout_ref.rollout.name = "hf"
    config.actor_rollout_ref.actor.checkpoint.save_contents = ["model", "hf_model"]
    actor = started(ActorWorker, config, 10)
    expected = plain_log_probs(tmp_path / "model")
    ours = actor.engine.forward_rows(make_batch(6), MicroBatchBudget(rows=3))["log_probs"]
    torch.testing.assert_close(ours, expected, atol=3e-5, rtol=0)

    rollout = beside(actor, RolloutWorker, config)
    for _, buffer in persistent_buffers(actor.engine.module):
        buffer.neg_()
    assert rollout.update_weights(1).error is None
    sent = buffers_of(rollout.engine.module)
    assert sent
    for name, buffer in persistent_buffers(actor.engine.module):
        assert sent[name].equal(buffer), name
    assert rollout.weights_checksum() == actor.weights_checksum()

    actor.save_checkpoint(str(tmp_path / "actor"))
    exported = plain_log_probs(tmp_path / "actor" / "huggingface")
    ours = actor.engine.forward_rows(make_batch(6), MicroBatchBudget(rows=3))["log_probs"]
    torch.testing.assert_close(ours, exported, atol=3e-5, rtol=0)
    assert (ours - expected).abs().max() > 1e-2  # the buffers count


def test_a_rollout_in_bfloat16_has_the_float32_buffers_of_the_actor(
    tmp_path: Path,
) -> None:
    config = tiny_config(save_model(tmp_path, "deepseek_v3"))
    config.actor_rollout_ref.rollout.name = "hf"
    config.actor_rollout_ref.rollout.dtype = "bfloat16"
    actor = started(ActorWorker, config, 10)
    rollout = beside(actor, RolloutWorker, config)
    assert rollout.update_weights(1).error is None

    module = rollout.engine.module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    sent = buffers_of(module)
    assert sent
    for name, buffer in persistent_buffers(actor.engine.module):
        assert buffer.dtype == torch.float32
        assert sent[name].equal(buffer), name
    assert rollout.weights_checksum() == actor.weights_checksum(as_sent=True)
    with torch.no_grad():
        assert module(input_ids=torch.arange(6, 14)[None]).logits.isfinite().all()


def sharded_actor(folder: Path) -> list[tuple[str, dict[str, Tensor]]]:
    """Return the weights of a rank's rollout and of an actor that resumes: checksum, buffers.

    The actor's buffers change before they are sent to the rollout and saved in a checkpoint.
    """
    config = tiny_config(folder, ppo_mini_batch_size=4)
    config.actor_rollout_ref.rollout.name = "hf"
    actor = started(ActorWorker, config, 10)
    rollout = beside(actor, RolloutWorker, config)
    for _, buffer in persistent_buffers(actor.engine.module):
        buffer.add_(1.0)
    actor.update_actor(own_chunk(make_batch(8), actor.rank, 2))
    assert rollout.update_weights(0).error is None
    actor.save_checkpoint(str(folder / "actor"))
    resumed = started(ActorWorker, config, 10)
    resumed.load_checkpoint(str(folder / "actor"))
    workers = rollout, resumed
    return [(worker.weights_checksum(), buffers_of(worker.engine.module)) for worker in workers]


def test_sharded_ranks_send_save_and_resume_buffers(tmp_path: Path) -> None:
    save_model(tmp_path, "deepseek_v3")
    before = buffers_of(load_model(tiny_config(tmp_path).actor_rollout_ref.model, "token"))
    workers = [worker for rank in run_kept(2, sharded_actor, tmp_path) for worker in rank]
    assert len({checksum for checksum, _ in workers}) == 1
    for _, buffers in workers:
        assert buffers.keys() == before.keys()
        assert all(buffers[name].equal(before[name] + 1.0) for name in before)


def test_the_bias_of_a_router_stays_float32_in_bfloat16_and_in_exports(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(save_model(tmp_path, "deepseek_v3"))
    config.actor_rollout_ref.model.dtype = "bfloat16"
    config.actor_rollout_ref.actor.checkpoint.save_contents = ["model", "hf_model"]
    edit_config = (tmp_path / "model" / "config.json").read_text()
    (tmp_path / "model" / "config.json").write_text(edit_config.replace("float32", "bfloat16"))
    actor = started(ActorWorker, config, 10)
    actor.save_checkpoint(str(tmp_path / "actor"))
    written = AutoModelForCausalLM.from_pretrained(
        tmp_path / "actor" / "huggingface", dtype="bfloat16"
    )
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    stored = load_file(tmp_path / "actor" / "huggingface" / "model.safetensors")
    assert stored["lm_head.weight"].dtype == torch.bfloat16
    for state in (dict(named_state(actor.engine.module)), stored, written.state_dict()):
        assert state[ROUTER_BIAS].equal(whole.state_dict()[ROUTER_BIAS])


@pytest.mark.parametrize(
    ("family", "name"),
    [("deepseek_v3", ROUTER_BIAS), ("gemma4_text", "model.layers.0.layer_scalar")],
)
def test_a_missing_buffer_is_rejected_by_name(family: str, name: str, tmp_path: Path) -> None:
    config = tiny_config(save_model(tmp_path, family))
    edit(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=rf"lacks 1 of its weights: {name}\. Save it again"):
        load_model(config.actor_rollout_ref.model, "token")
    edit(tmp_path, lambda tensors: tensors.update({f"{name}s": torch.ones(1)}))
    words = f"of its weights: {name}; it also has 1 entry that the model does not use: {name}s"
    with pytest.raises(ConfigError, match=words):
        load_model(config.actor_rollout_ref.model, "token")


def test_entries_that_transformers_ignores_are_ignored(tiny_dir: Path, tmp_path: Path) -> None:
    """Rotary tables, further layers that a class ignores, and heads that another replaces."""
    shutil.copytree(tiny_dir / "model", tmp_path / "model")
    model = tiny_config(tmp_path).actor_rollout_ref.model
    body = load_model(model, "token").get_output_embeddings().weight

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = body.detach().clone()
        tensors["score.weight"] = torch.ones(1, body.shape[1])

    edit(tmp_path, add)
    for head in ("token", "scalar", "score"):
        load_model(model, head)

    deepseek = save_model(tmp_path / "deepseek", "deepseek_v3")
    edit(deepseek, lambda tensors: tensors.update({"model.layers.61.norm.weight": torch.ones(2)}))
    load_model(tiny_config(deepseek).actor_rollout_ref.model, "token")
    load_model(tiny_config(deepseek).actor_rollout_ref.model, "scalar")


def test_a_critic_has_the_buffers_of_its_model(tmp_path: Path) -> None:
    critic = started(CriticWorker, tiny_config(save_model(tmp_path, "deepseek_v3")), 10)
    actor = started(ActorWorker, tiny_config(tmp_path), 10)
    theirs = buffers_of(actor.engine.module)
    assert theirs
    for name, buffer in buffers_of(critic.engine.module).items():
        assert buffer.equal(theirs[name])


def test_an_engine_without_its_buffers_is_rejected(tmp_path: Path) -> None:
    model = load_model(
        tiny_config(save_model(tmp_path, "gemma4_text")).actor_rollout_ref.model, "token"
    )
    sink = ModuleWriter(model)
    for name, parameter in model.named_parameters():
        sink.write_tensor(name, parameter.detach().clone())
    names = "model.layers.0.layer_scalar, model.layers.1.layer_scalar"
    with pytest.raises(WeightSyncError, match=f"4 missing: {names}"):
        sink.verify("sink")


def test_buffers_stay_weights_next_to_adapters(tmp_path: Path) -> None:
    config = tiny_config(save_model(tmp_path, "gemma4_text"))
    plain = started(ActorWorker, config, 10).engine
    config.actor_rollout_ref.model.lora_rank = 2
    adapted = started(ActorWorker, config, 10).engine
    assert adapted.weights_checksum() == plain.weights_checksum()
    assert {name for name, _ in adapted.named_full_tensors()} >= buffers_of(plain.module).keys()


def test_vllm_expects_the_buffers(tmp_path: Path) -> None:
    config = tiny_config(save_model(tmp_path, "gemma4_text"))
    model = load_model(config.actor_rollout_ref.model, "token")
    expected = expected_weights(config.actor_rollout_ref.model.path)
    assert expected.shapes == {name: weight.shape for name, weight in named_state(model)}
    assert expected.num_elements == sum(weight.numel() for _, weight in named_state(model))


def test_parameters_that_a_class_freezes_stay_frozen(tmp_path: Path) -> None:
    """afmoe's router bias is a parameter without gradients."""
    actor = started(ActorWorker, tiny_config(save_model(tmp_path, "afmoe")), 10)
    for name, parameter in actor.engine.module.named_parameters():
        assert parameter.requires_grad == (not name.endswith("expert_bias")), name
