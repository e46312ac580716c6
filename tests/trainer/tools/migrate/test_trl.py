"""TRL's commands and YAMLs: each composes, and every field is described."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Trainer,
    TrainingArguments,
)

from tests.trainer.tools.migrate.words import (
    composed,
    migrated,
    notes,
    translated,
    translated_whole,
)
from trainer.tools.migrate.systems import migrate
from verl_like.errors import ConfigError
from verl_like.record import Recorder
from workers.training.optim import build_optimizer

FIELDS = Path(__file__).with_name("trl_fields.txt").read_text(encoding="utf-8").splitlines()
"""Every field of TRL's four configurations, of `ModelConfig` and `ScriptArguments`."""
NUMBERS = {"num_train_epochs": "2", "generation_batch_size": "16", "resume_from_checkpoint": "a"}
TEXTS = {"loss_type": "dapo", "lr_scheduler_type": "cosine", "lora_target_modules": "q_proj v_proj"}
TINY: dict[str, Any] = {
    **{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}
GRPO = """
accelerate launch --num_processes 4 trl/scripts/grpo.py \\
    --model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name trl-lib/tldr \\
    --reward_model_name_or_path rm --learning_rate 1e-5 --per_device_train_batch_size 8 \\
    --gradient_accumulation_steps 2 --num_generations 8 --beta 0.04 --max_steps 100 \\
    --max_completion_length 64 --scale_rewards none --loss_type dr_grpo --use_peft \\
    --epsilon_high 0.28 --bf16 --logging_steps 10 --top_k 50
"""


def test_a_grpo_command_counts_prompts_and_keeps_its_losses() -> None:
    done = migrated("trl", GRPO)
    assert done.command().startswith("verl-like ppo \\\n")
    config = composed(done)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    # 4 processes x 8 completions x 2 accumulated = 64 completions, 8 of a prompt
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n) == (8, 8, 8)
    kl = (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type)
    assert kl == (True, 0.04, "k3_unclamped+")
    assert "use_bias_correction_kl: k3_unclamped+ has the gradient" in "\n".join(done.absent)
    line = f"{GRPO} --use_bias_correction_kl False".replace("\\\n", " ")
    uncorrected = translated_whole("trl", line)
    assert composed(uncorrected).actor_rollout_ref.actor.kl_loss_type == "k3_unclamped"
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 1e9)
    assert actor.loss_agg_mode == "seq-mean-token-sum-norm"
    assert not config.algorithm.norm_adv_by_std_in_grpo
    assert (rollout.top_k, rollout.name) == (50, "native")
    assert config.actor_rollout_ref.model.lora_rank == 16
    assert config.data.train_files == "hub://trl-lib/tldr:train"
    assert (config.reward.model.enable, config.reward.function.weight) == (True, 0)
    assert config.trainer.total_training_steps == 100
    assert config.trainer.n_gpus_per_node == 4


@pytest.mark.parametrize(
    ("flags", "level", "bounds"),
    [
        ("", "sequence", "1.0e-9_3.0"),
        ("--vllm_importance_sampling_mode token_truncate", "token", "3.0"),
        (
            "--vllm_importance_sampling_mode token_mask --vllm_importance_sampling_clip_min 0.5",
            "token",
            "0.5_3.0",
        ),
        ("--vllm_importance_sampling_correction False", None, "2.0"),
    ],
)
def test_vllm_samples_have_trl_s_importance_weights(
    flags: str, level: str | None, bounds: str
) -> None:
    command = f"trl grpo --model_name_or_path m --dataset_name a/b --use_vllm {flags}"
    config = composed(translated_whole("trl", command))
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == (level, bounds)


def test_cispo_has_trl_s_bounds() -> None:
    command = "trl grpo --model_name_or_path m --dataset_name a/b --loss_type cispo"
    actor = composed(translated_whole("trl", f"{command} --epsilon_high 4")).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (1.0, 3.0)
    done = translated_whole("trl", command)
    assert composed(done).actor_rollout_ref.actor.clip_ratio_high == 4.0
    assert any("ScaleRL" in line for line in done.absent)


def test_defaults_of_trl_are_set() -> None:
    config = composed(translated_whole("trl", "trl sft --model_name_or_path m --dataset_name a/b"))
    assert (config.optim.lr, config.optim.weight_decay) == (2e-5, 0.0)
    assert config.optim.lr_scheduler_type == "linear"
    assert (config.trainer.total_epochs, config.trainer.seed, config.trainer.save_freq) == (
        3,
        42,
        500,
    )
    assert config.data.train_batch_size == 8
    assert config.model.enable_gradient_checkpointing


def test_a_yaml_is_recognized_by_its_fields_or_its_command(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: a/b\nbeta: 0.2\nloss_type: [sigmoid, sft]\n"
    text += "loss_weights: [1.0, 0.5]\nwarmup_steps: 0.1\nmax_length: 512\n"
    done = migrated("trl", text)
    config = composed(done)
    assert (done.program, config.loss, config.beta) == ("dpo", "dpo", 0.2)
    assert (config.sft_coef, config.sft_agg_mode) == (0.5, "token-mean")
    assert (config.optim.lr_warmup_steps, config.optim.lr_warmup_steps_ratio) == (-1, 0.1)

    (tmp_path / "dpo.yaml").write_text(text, encoding="utf-8")
    by_command = migrated("trl", f"trl dpo --config {tmp_path}/dpo.yaml --beta 0.3")
    assert by_command.settings == done.settings | {"beta": "0.3"}
    with pytest.raises(ConfigError, match="do not show which TRL trainer"):
        migrated("trl", "model_name_or_path: m\n")


def test_a_grpo_command_has_trl_s_epsilon_and_its_warm_up_from_0() -> None:
    command = "trl grpo --model_name_or_path m --dataset_name a/b --warmup_steps 4 --use_cpu"
    config = composed(translated_whole("trl", command))
    assert config.algorithm.adv_epsilon == 1e-4  # TRL 1.16: / (std_rewards + 1e-4)
    assert config.actor_rollout_ref.actor.optim.lr_warmup_init_ratio == 0.0
    assert config.trainer.device == "cpu"
    unscaled = composed(translated_whole("trl", f"{command} --scale_rewards none"))
    assert unscaled.algorithm.adv_epsilon is None


def test_reward_models_and_unread_fields_are_translated() -> None:
    reward = "trl reward --model_name_or_path m --dataset_name a/b"
    config = composed(translated_whole("trl", f"{reward} --center_rewards_coefficient 0.01"))
    assert (config.center_coef, config.optim.lr) == (0.01, 1e-4)
    dpo = "trl dpo --model_name_or_path m --dataset_name a/b --label_smoothing 0.2"
    done = translated_whole("trl", dpo)
    config = composed(done)
    assert (config.loss, config.label_smoothing) == ("dpo", 0.0)
    assert "--label_smoothing 0.2: TRL's loss_type=sigmoid does not read it" in done.report()


@pytest.mark.parametrize("program", ["grpo", "sft", "reward", "dpo"])
def test_every_field_is_described(program: str) -> None:
    missing = []
    for line in FIELDS:
        of_program, name = line.split()
        value = NUMBERS.get(name) or TEXTS.get(name, "1")
        if of_program != program:
            continue
        done = translated("trl", f"trl {program} --{name} {value}")
        if not any(name in note for note in notes(done)) and not name.startswith("dataset_"):
            missing.append(name)
    assert set(missing) <= {"per_device_train_batch_size", "gradient_accumulation_steps"}


def test_packed_rows_have_the_same_tokens_per_step() -> None:
    command = "accelerate launch --num_processes 4 trl/scripts/sft.py --model_name_or_path m "
    command += "--dataset_name a/b --packing --max_length 2048 --per_device_train_batch_size 2"
    done = translated_whole("trl", command)
    # 4 processes x 2 rows of 2048 tokens
    assert done.settings["data.train_batch_size"] == "$((16384 / ROW_TOKENS))"
    assert any("ROW_TOKENS to the mean number" in line for line in done.absent)
    translation = translated_whole("trl", command.replace("--packing", "--packing False"))
    assert translation.settings["data.train_batch_size"] == "8"


def test_processes_in_accelerate_s_yaml_are_counted(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 2\n")
    command = f"accelerate launch --config_file {tmp_path}/zero3.yaml examples/scripts/dpo.py "
    config = composed(
        translated_whole("trl", f"{command} --model_name_or_path m --dataset_name a/b")
    )
    assert (config.data.train_batch_size, config.trainer.n_gpus_per_node) == (16, 2)


def test_visible_gpus_are_counted_and_an_unknown_number_is_noted() -> None:
    command = "accelerate launch trl/scripts/dpo.py --model_name_or_path m --dataset_name a/b"
    done = migrated("trl", f"CUDA_VISIBLE_DEVICES=0,1,2 {command}")
    assert composed(done).data.train_batch_size == 24
    assert any("number of processes" in line for line in translated_whole("trl", command).absent)
    one_process = translated_whole("trl", command.replace("accelerate launch", "python"))
    assert not any("number of processes" in line for line in one_process.absent)


def test_kto_has_its_weights_and_lengths(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: a/b\ndesirable_weight: 1.5\nmax_length: null\n"
    done = migrated("trl", text)
    config = composed(done)
    assert (done.program, config.loss, config.desirable_weight) == ("dpo", "kto", 1.5)
    assert config.data.max_length is None
    config = composed(translated_whole("trl", "trl kto --model_name_or_path m --dataset_name a/b"))
    assert (config.data.max_length, config.optim.lr, config.beta) == (1024, 1e-6, 0.1)


def test_differences_by_definition_are_noted() -> None:
    kto = "\n".join(
        translated_whole("trl", "trl kto --model_name_or_path m --dataset_name a/b").absent
    )
    assert "in TRL, the response of the row before it in the pass" in kto
    dpo = "trl dpo --model_name_or_path m --dataset_name a/b --loss_type sigmoid sft "
    dpo += "--loss_weights 0.5 1"
    done = translated_whole("trl", f"{dpo} --gradient_accumulation_steps 2")
    assert composed(done).sft_coef == 2.0
    assert any("over those of each pass" in line for line in done.absent)
    assert any("divided by 0.5" in line for line in done.absent)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(attention_bias=True, mlp_bias=True, **TINY),
        Qwen3Config(head_dim=4, **TINY),
        MixtralConfig(num_local_experts=2, **TINY),
        GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16),
    ],
    ids=lambda config: str(config.model_type),
)
def test_weights_decay_as_in_hf_s_trainer(config: Any, tmp_path: Path) -> None:
    command = "trl sft --model_name_or_path m --dataset_name a/b --weight_decay 0.1"
    optim = composed(translated_whole("trl", command)).optim
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    groups = build_optimizer(model, optim).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] == 0.1 for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    all_names = {name for name, _ in model.named_parameters()}
    assert names == all_names & set(trainer.get_decay_parameter_names(model)) < all_names


EXAMPLE = (
    "python examples/scripts/{}.py --model_name_or_path m --use_peft --lora_target_modules a, b"
)


def test_an_example_names_its_rows_and_rewards() -> None:
    done = migrated("trl", EXAMPLE.format("grpo_vlm"))
    config = composed(done)
    assert (config.data.train_files, config.data.image_key) == ("rows.parquet", "image")
    assert [reward.function for reward in config.reward.list] == [
        "think_format_reward",
        "accuracy_reward",
    ]
    assert config.actor_rollout_ref.model.target_modules == ["a", "b"]
    (line,) = done.incomplete
    assert "grpo_vlm.py makes its rows: write them into rows.parquet" in line
    assert "rows.parquet" in done.report().splitlines()[0]


def test_an_example_with_a_reward_in_its_code_is_the_file_of_the_reward() -> None:
    line = f"{EXAMPLE.format('grpo_continuous_batching')} --num_generations 4"
    function = composed(migrated("trl", line)).reward.function
    assert function.path == "examples/scripts/grpo_continuous_batching.py"
    assert function.name == "correctness_reward"


def test_rows_with_images_are_never_truncated_in_sft() -> None:
    done = migrated("trl", f"{EXAMPLE.format('sft_vlm')} --dataset_name a/b")
    assert composed(done).data.max_length is None
    converted = f"{EXAMPLE.format('sft_vlm_gemma3')} --dataset_name FanqingM/MMIU-Benchmark"
    assert "downloads images" in migrated("trl", converted).incomplete[0]


def test_rloo_has_its_kl_in_the_reward_and_one_update_per_step() -> None:
    command = "trl rloo --model_name_or_path m --dataset_name a/b --reward_model_name_or_path r"
    config = composed(translated_whole("trl", command))
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    assert (algorithm.adv_estimator, algorithm.use_kl_in_reward) == ("rloo", True)
    assert (algorithm.kl_penalty, algorithm.kl_ctrl.kl_coef) == ("kl", 0.05)
    assert (config.actor_rollout_ref.rollout.n, config.data.train_batch_size) == (2, 4)
    assert (actor.loss_agg_mode, actor.ppo_mini_batch_size) == ("seq-mean-token-sum", 4)
    without = composed(translated_whole("trl", f"{command} --beta 0"))
    assert not without.algorithm.use_kl_in_reward
    for flags in ("--num_iterations 2", "--steps_per_generation 8"):
        with pytest.raises(ConfigError, match="several updates"):
            translated_whole("trl", f"{command} {flags}")


def test_cpo_is_dpo_without_reference_plus_sft() -> None:
    command = "python examples/scripts/cpo.py --model_name_or_path m --dataset_name a/b"
    config = composed(translated_whole("trl", f"{command} --optim rmsprop --cpo_alpha 0.5"))
    assert (config.loss, config.reference_free, config.beta) == ("dpo", True, 0.1)
    assert (config.sft_coef, config.sft_agg_mode) == (0.5, "token-mean")
    assert config.optim.optimizer == "torch.optim.RMSprop"


def test_orpo_says_how_its_sft_loss_differs() -> None:
    command = "python examples/scripts/orpo.py --model_name_or_path m --dataset_name a/b --beta 0.2"
    done = translated_whole("trl", f"{command} --no_remove_unused_columns")
    config = composed(done)
    assert (config.loss, config.orpo_lambda, config.optim.lr) == ("orpo", 0.2, 1e-6)
    assert any("the prompt is in it" in line for line in done.absent)


def test_four_bits_need_adapters() -> None:
    command = "trl dpo --model_name_or_path m --dataset_name a/b --load_in_4bit"
    model = composed(translated_whole("trl", f"{command} --use_peft")).model
    assert (model.quantization, model.lora_rank) == ("nf4", 16)
    with pytest.raises(ConfigError, match="add --use_peft"):
        translated_whole("trl", command)


def test_the_end_token_of_a_tokenizer_is_set_in_its_folder() -> None:
    command = "trl sft --model_name_or_path m --dataset_name a/b --eos_token '<|im_end|>'"
    assert "tokenizer_config.json" in migrated("trl", command).incomplete[0]


def test_a_cosine_schedule_has_trl_s_minimum() -> None:
    command = "trl sft --model_name_or_path m --dataset_name a/b --lr_scheduler_type "
    command += """cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}'"""
    optim = composed(translated_whole("trl", command)).optim
    assert (optim.lr_scheduler_type, optim.min_lr_ratio) == ("cosine", 0.1)


def test_a_recorded_trainer_is_translated_with_its_rewards(tmp_path: Path) -> None:
    rewards, script = tmp_path / "rewards.py", tmp_path / "train.py"
    rewards.write_text("def right(completions, **kwargs): ...\n", encoding="utf-8")
    script.write_text("import torch\nfrom trl import GRPOConfig\n", encoding="utf-8")
    Recorder(
        tmp_path / "record",
        "trl",
        {
            **{"trainer": "grpo", "model_name_or_path": "m", "beta": 0.04, "num_generations": 4},
            **{"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 20},
            **{"gradient_accumulation_steps": 2, "generation_batch_size": 16, "use_cpu": True},
            "activation_checkpointing": False,
            "given": ["beta", "num_generations", "steps_per_generation", "max_steps", "use_cpu"]
            + ["gradient_accumulation_steps", "generation_batch_size", "activation_checkpointing"],
            "reward_funcs": [f"{rewards}:right", f"{script}:right", "org/model"],
            "reward_weights": [1.0, 0.5, 2.0],
        },
    )
    (done,) = migrate("trl", str(tmp_path / "record"))
    config = composed(done)
    assert [(item.name, item.kind, item.weight) for item in config.reward.list] == [
        *(("right", "function", 1.0), ("right2", "function", 0.5), ("model", "model", 2.0))
    ]
    assert config.reward.list[0].path == str(rewards)
    assert (config.data.train_batch_size, config.data.train_files) == (4, "rows.parquet")
    assert config.trainer.total_training_steps == 20
    assert not config.actor_rollout_ref.model.enable_gradient_checkpointing
    assert [line for line in done.incomplete if line.startswith(f"{script} imports trl")]
    assert "trainer.train_dataset.to_parquet('rows.parquet')" in done.report()


def test_a_script_with_its_settings_in_its_code_is_recorded_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import GRPOConfig\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="record a step of it .*pass the record's folder"):
        migrate("trl", str(script))
    with pytest.raises(ConfigError, match="record a step of it .*pass the record's folder"):
        migrate("trl", f"python {script}")
