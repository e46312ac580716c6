"""verl's drivers become commands of the same experiment, or an error that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.tools.migrate.words import composed, migrated, translated_whole
from trainer.tools.migrate.systems import migrate
from verl_like.errors import ConfigError

MAIN = "python3 -m verl.trainer.main_ppo data.train_files=x actor_rollout_ref.model.path=y"
ACTOR, TURNS = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.multi_turn"
ASYNC = """
python -m verl.experimental.{driver} data.train_files=x data.val_files=v \\
    actor_rollout_ref.model.path=y algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.hybrid_engine=False trainer.nnodes=1 trainer.n_gpus_per_node=4 \\
    rollout.nnodes=1 rollout.n_gpus_per_node=4 {more}
"""


MEGATRON = f"{ACTOR}.strategy=megatron {ACTOR}.megatron"


def test_a_layout_that_is_not_supported_is_dropped_with_a_note() -> None:
    words = f"{MEGATRON}.tensor_model_parallel_size=2 {ACTOR}.megatron.expert_model_parallel_size=4"
    done = translated_whole("verl", f"{MAIN} {words}")
    assert composed(done).actor_rollout_ref.actor.parallel == {"ep": 4}
    assert any(f"{ACTOR}.parallel.ep=4 keeps whole experts" in line for line in done.absent)


def test_rows_per_pass_are_divided_among_data_parallel_processes() -> None:
    words = f"{ACTOR}.megatron.tensor_model_parallel_size=4 {ACTOR}.ppo_micro_batch_size=6"
    config = composed(translated_whole("verl", f"{MAIN} {words}"))
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 3


def test_a_yaml_is_read_with_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {max_prompt_length: 7}"
    )
    own = "hydra: {searchpath: [a]}\ndefaults: [base, _self_]\ndata:\n  train_batch_size: 512\n"
    own += "algorithm: {kl_ctrl: {kl_coef: 0.5}, use_kl_in_reward: true}\n"
    own += "actor_rollout_ref: {rollout: {n: 3}}\n"
    (tmp_path / "own.yaml").write_text(own)
    text = f'CONFIG="{tmp_path}"\n{MAIN} --config-path="$CONFIG" --config-name own '
    text += "actor_rollout_ref.rollout.n=5"
    config = composed(migrated("verl", text))
    assert (config.data.train_batch_size, config.data.max_prompt_length) == (512, 7)
    assert (config.algorithm.kl_ctrl.kl_coef, config.actor_rollout_ref.rollout.n) == (0.5, 5)
    with pytest.raises(ConfigError, match="there is no .*missing.yaml. Run this command"):
        translated_whole("verl", f"{MAIN} --config-path={tmp_path} --config-name=missing")
    (tmp_path / "own.yaml").write_text("defaults: [{actor: mine}, _self_]")
    with pytest.raises(ConfigError, match="includes .*mine"):
        translated_whole("verl", f"{MAIN} --config-path={tmp_path} --config-name=own")


def test_tools_of_the_user_replace_the_script_s_tools() -> None:
    words = f"{TURNS}.enable=True {TURNS}.tool_config_path=t.yaml "
    words += f"{TURNS}.max_assistant_turns=5 environment.tools=[tools.py:calculate]"
    done = translated_whole("verl", f"{MAIN} {words}")
    environment = composed(done).environment
    assert (environment.tools, environment.max_turns) == (["tools.py:calculate"], 5)
    assert [line.partition("=")[0] for line in done.absent] == [
        f"{TURNS}.enable",
        f"{TURNS}.tool_config_path",
    ]


def test_dapo_needs_filtered_groups_for_larger_batches() -> None:
    drawn = MAIN.replace("verl.trainer.main_ppo", "recipe.dapo.main_dapo")
    drawn += " data.gen_batch_size=96 data.train_batch_size=32"
    drawn += " actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=2"
    filtered = f"{drawn} algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc"
    assert composed(translated_whole("verl", filtered)).algorithm.filter_groups.enable
    with pytest.raises(ConfigError, match="gen_batch_size=96: a step has data.train_batch_size"):
        translated_whole("verl", drawn)


def test_a_reward_model_s_score_is_the_only_reward() -> None:
    words = "reward_model.enable=True reward_model.model.path=rm reward_model.rollout.name=vllm"
    config = composed(translated_whole("verl", f"{MAIN} {words}"))
    assert (config.reward.model.enable, config.reward.function.weight) == (True, 0)


def test_dapo_s_reward_manager_becomes_a_length_penalty() -> None:
    section = "reward_model.reward_kwargs"
    words = f"reward_model.reward_manager=dapo {section}.overlong_buffer_cfg.enable=True "
    words += f"{section}.overlong_buffer_cfg.len=128 {section}.max_resp_len=512 "
    words += f"{section}.overlong_buffer_cfg.log=False"
    buffer = composed(translated_whole("verl", f"{MAIN} {words}")).reward.overlong_penalty
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 128, 1.0)
    with pytest.raises(ConfigError, match="max_resp_len=512: the length penalty ends at"):
        translated_whole("verl", f"{MAIN} {words} data.max_response_length=1024")


def test_one_step_off_policy_becomes_an_async_run_of_staleness_1() -> None:
    done = migrated("verl", ASYNC.format(driver="one_step_off_policy.main_ppo", more=""))
    config = composed(done)
    assert (
        done.program,
        config.async_training.max_staleness,
        config.async_training.generators,
    ) == ("async", 1, 1)
    assert config.resource_pool_spec == {"trainer_pool": [4], "generator_0_pool": [4]}
    assert config.algorithm.rollout_correction.bypass_mode
    assert (config.data.train_batch_size, config.trainer.n_gpus_per_node) == (1024, 8)


def test_fully_asynchronous_counts_are_translated() -> None:
    counts = "data.train_batch_size=0 data.gen_batch_size=1 rollout.total_rollout_steps=51200 "
    counts += "rollout.test_freq=10 async_training.require_batches=4 rollout.total_epochs=2 "
    counts += "async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=2"
    done = migrated("verl", ASYNC.format(driver="fully_async_policy.fully_async_main", more=counts))
    config = composed(done)
    async_training, trainer = config.async_training, config.trainer
    # 4 x 32 prompts a step, a version every 2 steps; half a version's samples may be older
    assert (config.data.train_batch_size, async_training.update_steps) == (128, 2)
    assert (async_training.max_staleness, async_training.max_inflight_samples) == (
        1,
        int(128 * 16 * 2 * 1.5),
    )
    assert (trainer.total_training_steps, trainer.test_freq, trainer.total_epochs) == (400, 20, 2)
    assert async_training.weight_update == "immediate"  # verl's default is partial rollouts


SFT = """
torchrun --standalone --nnodes=1 --nproc_per_node=$1 -m verl.trainer.{driver} \\
    data.train_files=x data.val_files=v {words}
"""


def test_sft_has_verl_s_defaults_and_torchrun_s_processes(tmp_path: Path) -> None:
    words = "data.prompt_key=extra_info data.prompt_dict_keys=['question'] "
    words += "+data.response_dict_keys=['answer'] data.response_key=extra_info "
    words += "data.micro_batch_size=16 model.partial_pretrain=y ulysses_sequence_parallel_size=2"
    (tmp_path / "sft.sh").write_text(SFT.format(driver="fsdp_sft_trainer", words=words))
    (done,) = migrate("verl", str(tmp_path / "sft.sh"), ["4"])
    config = composed(done)
    assert (config.optim.lr, list(config.optim.betas)) == (1e-5, [0.9, 0.95])
    assert (config.optim.lr_scheduler_type, config.optim.lr_warmup_steps_ratio) == ("cosine", 0.1)
    assert (config.data.train_batch_size, config.data.max_length) == (256, 1024)
    assert (config.data.use_dynamic_bsz, config.data.micro_batch_size_per_gpu) == (False, 4)
    assert (config.trainer.total_epochs, config.trainer.n_gpus_per_node) == (4, 4)
    assert any("columns prompt and response" in line for line in done.absent)


def test_sft_with_an_engine_is_translated() -> None:
    words = "model.path=y optim.lr=2e-5 optim.warmup_style=cosine optim.min_lr_ratio=0.1 "
    words += "engine=fsdp2 optim=fsdp2 engine.ulysses_sequence_parallel_size=2 "
    words += "data.max_token_len_per_gpu=4096 checkpoint.save_contents=[model] "
    words += "data.ignore_input_ids_mismatch=True"
    line = SFT.format(driver="sft_trainer", words=words).replace("$1", "2").replace("\\\n", "")
    config = composed(translated_whole("verl", line))
    assert (config.optim.lr, config.optim.lr_scheduler_type) == (2e-5, "cosine")
    assert (config.data.use_dynamic_bsz, config.data.max_token_len_per_gpu) == (True, 4096)
    assert config.parallel.sp == 2
    config = composed(translated_whole("verl", line.replace("path=y", "path=Qwen/Qwen3-VL-2B")))
    assert not config.model.freeze_vision_tower, "verl trains it"


def test_a_missing_backslash_is_noted() -> None:
    text = f"{MAIN} \\\n  trainer.nnodes=1\n  # more\n  trainer.total_epochs=3 data.shuffle=False"
    done = migrated("verl", text)
    assert done.settings["trainer.total_epochs"] == "30"
    assert done.notices == [
        "the script runs trainer.total_epochs=3 ... as a separate command: a backslash "
        "may be missing at the end of the line before it"
    ]


def test_keys_that_verl_does_not_read_are_left_out() -> None:
    done = translated_whole("verl", f"{MAIN} trainer.resume_from_path=checkpoints")
    assert "trainer.resume_from_path" not in done.settings
    done = translated_whole("verl", f"{MAIN} trainer.logger=['console','swanlab']")
    assert done.settings["trainer.logger"] == "[console]"
    assert any("swanlab" in line for line in done.absent)


DISTILLATION = """
algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=1 distillation.enabled=True
distillation.nnodes=1
distillation.teacher_models.teacher_model.model_path=t
distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=2
distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_task_rewards=False
distillation.distillation_loss.use_policy_gradient=True distillation.distillation_loss.topk=64
distillation.distillation_loss.loss_max_clamp=10.0
"""


def test_a_teacher_of_verl_is_ours_if_the_log_ratio_is_an_advantage() -> None:
    line = f"{MAIN} {DISTILLATION}".replace("\n", " ")
    done = translated_whole("verl", line)
    distillation = composed(done).distillation
    assert (distillation.teacher_model.model_path, distillation.use_task_rewards) == ("t", False)
    assert any("are not clamped" in line for line in done.absent)
    named = translated_whole("verl", line.replace("teacher_model.", "gsm8k."))
    assert named.settings == done.settings
    for old, new, words in (
        ("loss_mode=k1", "loss_mode=forward_kl_topk", "the advantage is the log-ratio"),
        ("use_policy_gradient=True", "use_policy_gradient=False", "as a loss is not supported"),
        ("teacher_models.teacher_model.model_path", "teacher_models.a.model_path", "one teacher"),
    ):
        with pytest.raises(ConfigError, match=words):
            translated_whole("verl", line.replace(old, new))


def test_other_engines_of_verl_become_fsdp_and_parallel() -> None:
    for engine in ("dp", "fsdp2", "megatron", "veomni"):
        done = translated_whole("verl", f"{MAIN} model_engine={engine}")
        assert composed(done).actor_rollout_ref.actor.strategy == "fsdp"
        is_other = engine in ("megatron", "veomni")
        assert any(f"{engine}: FSDP and `parallel` divide" in s for s in done.absent) == is_other
    with pytest.raises(ConfigError, match="actor.strategy=torchtitan"):
        translated_whole("verl", f"{MAIN} model_engine=torchtitan")


def test_settings_of_megatron_become_ours() -> None:
    megatron = f"{ACTOR}.megatron"
    words = f"model_engine=megatron {megatron}.tensor_model_parallel_size=2 "
    words += f"{megatron}.pipeline_model_parallel_size=3 {megatron}.context_parallel_size=4 "
    words += f"{megatron}.param_offload=True {megatron}.router_replay.mode=R3 "
    words += f"{ACTOR}.optim.lr=2e-6 {ACTOR}.optim.min_lr=5e-7 {ACTOR}.optim.lr_decay_style=cosine "
    words += f"{MOE}.moe_router_load_balancing_type=none {ACTOR}.optim.betas=[0.9,0.98]"
    words += " trainer.nnodes=3 critic.megatron.param_offload=True"
    done = translated_whole("verl", f"{MAIN} {words}")
    actor, critic = composed(done).actor_rollout_ref.actor, composed(done).critic
    assert actor.parallel == {"tp": 2, "pp": 3, "sp": 4}
    assert actor.fsdp_config["param_offload"]
    assert critic.model.fsdp_config["param_offload"]
    assert (actor.router_replay.mode, actor.optim.min_lr_ratio) == ("R3", 0.25)
    assert actor.optim.optimizer == "AdamWMatrixDecay"  # as in Megatron
    assert any("betas=[0.9,0.98]: verl does not pass them" in line for line in done.absent)


MOE = f"{ACTOR}.megatron.override_transformer_config"


def test_a_load_balancing_loss_that_verl_turns_off_is_left_out() -> None:
    coefficient = f"{MOE}.moe_aux_loss_coeff=0.01"
    done = translated_whole("verl", f"{MAIN} model_engine=megatron {coefficient}")
    assert any(line.startswith(f"{coefficient}: verl computes no") for line in done.absent)


@pytest.mark.parametrize(("size", "ours"), [(4, 4), (8, 8), (16, -1)])
def test_settings_of_veomni_become_ours(size: int, ours: int) -> None:
    veomni = f"{ACTOR}.veomni"
    words = f"model_engine=veomni {veomni}.ulysses_parallel_size=2 {veomni}.fsdp_size={size} "
    words += f"{veomni}.expert_parallel_size=4 {ACTOR}.optim.lr_warmup_steps=7 trainer.nnodes=2 "
    words += "trainer.n_gpus_per_node=8"
    done = translated_whole("verl", f"{MAIN} {words}")
    actor = composed(done).actor_rollout_ref.actor
    assert actor.parallel == {"sp": 2, "ep": 4}
    assert actor.fsdp_config["fsdp_size"] == ours
    # verl's defaults for this engine
    assert (actor.optim.lr_scheduler_type, actor.optim.lr_warmup_steps) == ("cosine", 0)
    assert any("lr_warmup_steps=7: verl gives VeOmni only" in line for line in done.absent)


def test_engines_of_sft_become_fsdp_and_parallel() -> None:
    line = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=x model.path=y"
    words = "engine=megatron optim=megatron engine.tensor_model_parallel_size=2 optim.lr=1e-5 "
    words += "engine.pipeline_model_parallel_size=4 optim.min_lr=1e-6 optim.lr_decay_style=cosine"
    config = composed(translated_whole("verl", f"{line} {words}"))
    assert (config.parallel.tp, config.parallel.pp) == (2, 4)
    assert (config.optim.optimizer, config.optim.min_lr_ratio) == ("AdamWMatrixDecay", 0.1)
    words = "engine=automodel optim=automodel engine.tp_size=2 engine.ep_size=4 optim.lr=1e-5"
    done = translated_whole("verl", f"{line} {words}")
    config = composed(done)
    assert (config.parallel.tp, config.parallel.ep) == (1, 4)
    assert any("tensor parallelism (2): parallel.ep=4" in line for line in done.absent)
    assert (config.optim.lr_scheduler_type, config.optim.min_lr_ratio) == ("cosine", 0.01)
    with pytest.raises(ConfigError, match="init_lr_ratio: 0.1 is the default of automodel"):
        translated_whole("verl", f"{line} {words} optim.lr_warmup_steps=3")


def test_keys_that_verl_moved_are_found() -> None:
    words = "actor_rollout_ref.actor.policy_loss.loss_mode=sapo critic.enable=False "
    words += "actor_rollout_ref.actor.policy_loss.tau_pos=1.5 data.max_prompt_length=300 "
    words += "actor_rollout_ref.rollout.prompt_length=300 algorithm.adv_estimator=grpo "
    words += "actor_rollout_ref.actor.checkpoint.strict=False actor_rollout_ref.rollout.n=2 "
    words += "actor_rollout_ref.ref.fsdp_config.optimizer_offload=True "
    words += "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"
    done = translated_whole("verl", f"{MAIN} {words}")
    assert composed(done).actor_rollout_ref.actor.policy_loss.args["tau_pos"] == 1.5
    assert composed(done).actor_rollout_ref.model.dtype == "bfloat16"
    assert len([line for line in done.always if "critic.enable" in line or "strict" in line]) == 2
    with pytest.raises(ConfigError, match="prompt_length=300: set data.max_prompt_length"):
        translated_whole("verl", f"{MAIN} {words} data.max_prompt_length=200")
