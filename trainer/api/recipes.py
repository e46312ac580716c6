"""The recipes as classes: `from verl_like import PPO, GRPO, SFT, DPO, KTO, ...`.

    run = GRPO("gpt2", ["The sky is"], lambda response: float("blue" in response), lr=1e-6, n=8)
    result = run.fit(steps=20)          # .metrics, .model, .plot()
    result = run.fit(steps=20)          # 20 more
    run.command()                       # the same on the command line

Further keywords are flat names (`trainer.api.flat_names`) or keys of the recipe's configuration:
`placement="split"`, a section as a dict, a dotted name, `**{"trainer.val_before_train": False}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trainer.api.flat_names import (
    PPO_NAMES,
    ROW_NAMES,
    TRL_PPO_OBJECTS,
    TRL_ROW_OBJECTS,
    PPOKeys,
    RowKeys,
    Section,
    passed_arguments,
    with_our_names,
)
from trainer.api.inputs import Row, prompt_row
from trainer.api.python_run import PythonRun, bare_errors, require_counts
from trainer.data import files
from trainer.data.config import DataConfig
from trainer.data.lm_rows import check_lm_row, lm_columns_of
from trainer.data.media import ReadColumns, read_media
from trainer.data.pairs import check_labeled, check_pair, labeled_columns_of, pair_columns_of
from trainer.ppo.config import PPOConfig
from trainer.run_folder.result import RunResult
from verl_like.errors import ConfigError
from workers.config.rows import loss_reads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAIR = '[{"prompt": "Hi", "chosen": "Hello!", "rejected": "?"}]'


class PPO(PythonRun):
    """PPO and its variants: a policy learns from rewards for its responses.

    For example, with a column `total` in the rows:

        prompts = [{"prompt": f"{n} + 2 =", "total": str(n + 2)} for n in range(64)]

        def reward(response, total):
            return float(response.strip() == total)

        run = PPO("Qwen/Qwen3-0.6B", prompts, reward, lr=1e-6)
        run.fit(steps=10)
    """

    _recipe_path = "trainer.ppo.recipe.PPO"
    _example = '["Say a joke."], lambda response: len(response)'
    _flat_names = PPO_NAMES
    _data_names = {"data.train_files": "prompts", "data.val_files": "val_prompts"}
    _model_sections = {
        "actor": "actor_rollout_ref.model",
        "critic": "critic.model",
        "reward_model": "reward.model",
        "ref": "actor_rollout_ref.ref.model",
    }

    @bare_errors
    def __init__(
        self,
        model: str | Path | PreTrainedModel | Mapping[str, Any] | Callable[[], Any] | None = None,
        prompts: str | Path | int | Iterable[Any] | None = None,
        reward: Callable[..., Any] | Sequence[Any] | Section | None = None,
        *,
        val_prompts: str | Path | int | Iterable[Any] | None = None,
        tokenizer: Any = None,
        callbacks: Sequence[object] = (),
        lr: float | None = None,
        critic_lr: float | None = None,
        n: int | None = None,
        mini_batch_size: int | None = None,
        max_prompt_length: int | None = None,
        max_response_length: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        kl_loss_coef: float | None = None,
        clip_ratio: float | None = None,
        lora_rank: int | None = None,
        lora_alpha: int | None = None,
        engine: str | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        seed: int | None = None,
        devices: int | None = None,
        save_to: str | Path | None = None,
        save_every: int | None = None,
        validate_every: int | None = None,
        logger: str | Sequence[str] | None = None,
        **keys: Unpack[PPOKeys],
    ) -> None:
        """Write the models and data in memory to the run folder, and check the configuration.

        A parameter that is None has the value of a preset (`algorithm="dapo"`) if the preset sets
        it, or the default that is shown here.

        Args:
            model: a folder, a name on the hub, or a model of transformers with its `tokenizer`; for
                several roles a dict of actor, critic, reward_model, ref; or a function that returns
                any of these.
            prompts: texts, chats, or dicts with a `prompt` (a list, a `datasets.Dataset`, or any
                other iterable), file names, or the number of prompts that the environment makes.
            reward: a function, a module's `forward`, or a reward model of transformers; by default,
                the rule of each row's data_source. A function's parameters name its inputs:
                `prompt`, `response`, columns of the row, verl's `solution_str`, `ground_truth`,
                ..., or `**row` for all of them. A list combines several rewards, also dicts as in
                the configuration's `reward.list`. A dict is the configuration's section `reward`.
            val_prompts: prompts for validation, like `prompts`.
            tokenizer: the tokenizer of models in memory.
            callbacks: objects with hooks of `verl_like.Hooks`, which get the trainer as the first
                argument.
            lr: the actor's learning rate (default: 1e-6).
            critic_lr: the critic's learning rate (default: 1e-5).
            n: samples per prompt (default: 1; `GRPO`: 8).
            mini_batch_size: size of a mini-batch in prompts (default: 64); it has `n` times as
                many samples.
            max_prompt_length: longest prompt in tokens (default: 512).
            max_response_length: longest response in tokens (default: 512).
            temperature: sampling temperature (default: 1.0).
            top_p: total probability of the tokens to sample from (default: 1.0).
            kl_loss_coef: weight of the KL in the loss (default: 0; `GRPO`: 0.04); 0 removes it.
            clip_ratio: clip range of the probability ratio (default: 0.2).
            lora_rank: LoRA rank (default: 0); 0 trains all weights.
            lora_alpha: adapters are scaled by lora_alpha / lora_rank (default: 16).
            engine: rollout engine, such as "vllm" (default: "auto").
            batch_size: prompts per step (default: 1024, or all prompts in memory if they are
                fewer).
            epochs: passes over the prompts (default: 1, or as many as `fit(steps)` needs).
            seed: seed of data order, sampling and new heads (default: 1).
            devices: GPUs (or CPU processes) per node (default: 1; `AsyncPPO`: 2).
            save_to: the run folder; by default, a new folder in runs/verl_like.
            save_every: steps between checkpoints; by default, only after the last step and every
                half hour.
            validate_every: steps between validations (default: 0, only after the last step).
            logger: loggers, such as "wandb" (default: "console").
            keys: keys of the configuration, such as `algorithm="dapo"`,
                `environment="guess.py:Guess"` or
                `actor_rollout_ref={"actor": {"entropy_coeff": 0.01}}`, or names of TRL
                such as `num_generations` and `train_dataset`.
        """
        arguments = passed_arguments([*PPO_NAMES, *TRL_PPO_OBJECTS.values()], locals())
        settings = with_our_names({**keys, **arguments}, TRL_PPO_OBJECTS)
        prompts, val_prompts, tokenizer, reward = (
            settings.pop(name, None) for name in TRL_PPO_OBJECTS.values()
        )
        self._require(model=model, prompts=prompts)
        if reward is not None:
            rewards = reward if isinstance(reward, list | tuple) else [reward]
            settings["reward"] = reward if isinstance(reward, Mapping) else {"list": rewards}
        data = {"data.train_files": prompts, "data.val_files": val_prompts}
        if any(name.partition(".")[0] == "environment" for name in settings):
            numbers = {key: value for key, value in data.items() if files.is_num_prompts(value)}
            data, settings = {**data, **dict.fromkeys(numbers)}, settings | numbers
        super().__init__(model, data, tokenizer=tokenizer, callbacks=callbacks, keys=settings)

    def _rows_of(self, key: str, items: Sequence[Any], settings: Mapping[str, Any]) -> list[Row]:
        """Return prompts in verl's schema; fewer than the default batch form one batch."""
        prompt_key = settings.get("data.prompt_key", "prompt")
        rows = [prompt_row(item, prompt_key) for item in items]
        if any(row.get(prompt_key) for row in rows):  # otherwise `_check_row` says what is wrong
            self._columns = files.other_columns(rows, prompt_key)
        if key == "data.train_files" and len(rows) < DataConfig.train_batch_size:
            self._defaults["data.train_batch_size"] = len(rows)
        return rows

    def _check_row(self, row: Row, config: Any, folders: Sequence[Path]) -> None:
        """Check the columns of a prompt, unless the user's class reads them."""
        data = config.data
        if not data.custom_cls.path:
            columns = ReadColumns([data.prompt_key])
            row, _ = read_media(row, columns, folders, image_key=data.image_key)
            files.prompt_row(row, data.prompt_key, needs_rules=False)

    @bare_errors
    def fit(
        self,
        steps: int | None = None,
        *,
        num_episodes: int | None = None,
        max_timesteps: int | None = None,
        update_timesteps: int | None = None,
    ) -> RunResult:
        """Run `steps` more steps; without arguments, run for the length that the keys set.

        The run resumes as `trainer.resume_mode` says: by default, from the newest checkpoint in the
        run folder. By default, it also saves a checkpoint after its last step.

        Args:
            steps: number of further steps. The other parameters replace it in ColossalChat scripts,
                which pass all three.
            num_episodes: `num_episodes` times `max_timesteps` is the number of further rollouts.
            max_timesteps: see `num_episodes`.
            update_timesteps: rollouts per training step (`data.train_batch_size` prompts). The last
                step may have fewer.
        """
        counts = {
            "num_episodes": num_episodes,
            "max_timesteps": max_timesteps,
            "update_timesteps": update_timesteps,
        }
        if not any(count is not None for count in counts.values()):
            return super().fit(steps)
        if steps is not None:
            raise ConfigError(
                f"steps={steps} and another argument both set the run's length. Pass only steps, "
                f"or only {', '.join(counts)}."
            )

        length = self._prompts_of(**require_counts(**counts))
        return self._run_with(length)

    def _prompts_of(
        self, num_episodes: int, max_timesteps: int, update_timesteps: int
    ) -> dict[str, int]:
        """Return the setting that makes the run longer by this number of rollouts."""
        config = self.config()
        assert isinstance(config, PPOConfig), "the recipe's schema"
        size = config.data.train_batch_size
        if size % update_timesteps:
            raise ConfigError(
                f"data.train_batch_size={size} is not a multiple of update_timesteps="
                f"{update_timesteps}. Set update_timesteps to a divisor of {size}, or "
                f"data.train_batch_size={size + update_timesteps - size % update_timesteps}."
            )
        per_rollout = size // update_timesteps
        prompts = num_episodes * max_timesteps * per_rollout
        return {"data.total_prompts": self._steps_made() * size + prompts}


class GRPO(PPO):
    """GRPO: samples of one prompt are compared with each other, without a critic.

    The most important parameters after the model, the prompts and the reward are `n`, `lr`,
    `batch_size`, `max_response_length` and `save_to`. As in the paper, the loss has a KL to the
    initial model, with the weight 0.04; `kl_loss_coef` changes it.

        run = GRPO("Qwen/Qwen3-0.6B", prompts, reward, n=8, lr=1e-6, save_to="runs/grpo")
        run.fit(steps=100)
    """

    _presets = {"algorithm": "grpo"}


class AsyncPPO(PPO):
    """PPO that generates and trains at the same time, on separate pools.

    For example, on two GPUs, one of which generates:

        run = AsyncPPO("Qwen/Qwen3-0.6B", prompts, reward, algorithm="grpo", lr=1e-6)
        run.fit(steps=100)
    """

    _recipe_path = "trainer.async_training.recipe.ASYNC"


class RowsRun(PythonRun):
    """A recipe that trains one model on rows."""

    @bare_errors
    def __init__(
        self,
        model: str | Path | PreTrainedModel | Callable[[], Any] | None = None,
        /,
        rows: str | Path | Iterable[Any] | None = None,
        val_rows: str | Path | Iterable[Any] | None = None,
        *,
        tokenizer: Any = None,
        callbacks: Sequence[object] = (),
        lr: float | None = None,
        max_length: int | None = None,
        lora_rank: int | None = None,
        lora_alpha: int | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        seed: int | None = None,
        devices: int | None = None,
        save_to: str | Path | None = None,
        save_every: int | None = None,
        validate_every: int | None = None,
        logger: str | Sequence[str] | None = None,
        **keys: Unpack[RowKeys],
    ) -> None:
        """Write the model and rows in memory to the run folder, and check the configuration.

        `model` may be passed by name. With a positional model, `model={...}` sets keys of the
        section `model`. A parameter that is None has the default that is shown here.

        Args:
            model: a folder, a name on the hub, or a model of transformers with its `tokenizer`.
            rows: dicts (a list, a `datasets.Dataset`, or any other iterable), or file names.
                Columns of `SFT`: `messages`, or `prompt` and `response`, or `text`; of `DPO` and
                `RewardModelTraining`: `prompt`, `chosen`, `rejected`; of `KTO`: `prompt`,
                `completion`, `label`.
            val_rows: rows for validation, like `rows`.
            tokenizer: the tokenizer of a model in memory.
            callbacks: objects with hooks of `verl_like.Hooks`, which get the trainer as the first
                argument.
            lr: learning rate (default: 1e-5).
            max_length: length in tokens to which rows are truncated (default: 1024, or the model's
                limit if it is lower).
            lora_rank: LoRA rank (default: 0); 0 trains all weights.
            lora_alpha: adapters are scaled by lora_alpha / lora_rank (default: 16).
            batch_size: rows per optimizer step (default: 64).
            epochs: passes over the rows (default: 1, or as many as `fit(steps)` needs).
            seed: seed of the data order and of new heads (default: 1).
            devices: GPUs (or CPU processes) per node (default: 1).
            save_to: the run folder; by default, a new folder in runs/verl_like.
            save_every: steps between checkpoints; by default, only after the last step and every
                half hour.
            validate_every: steps between validations (default: 0, only after the last step).
            logger: loggers, such as "wandb" (default: "console").
            keys: keys of the configuration, such as `optim={"weight_decay": 0.1}`, or names of TRL
                such as `output_dir` and `train_dataset`.
        """
        arguments = passed_arguments([*ROW_NAMES, *TRL_ROW_OBJECTS.values()], locals())
        settings = with_our_names({**keys, **arguments}, TRL_ROW_OBJECTS)
        model = settings.pop("model", None) if model is None else model
        rows, val_rows, tokenizer = (settings.pop(name, None) for name in TRL_ROW_OBJECTS.values())
        self._require(model=model, rows=rows)
        data = {"data.train_files": rows, "data.val_files": val_rows}
        super().__init__(model, data, tokenizer=tokenizer, callbacks=callbacks, keys=settings)


class SFT(RowsRun):
    """Supervised fine-tuning (SFT) on texts, chats, or dicts with `prompt` and `response`.

    For example, on one row:

        SFT("Qwen/Qwen3-0.6B", [{"prompt": "2 + 2", "response": "4"}], lr=1e-5).fit(steps=10)
    """

    _recipe_path = "trainer.sft.recipe.SFT"
    _example = '[{"prompt": "2 + 2", "response": "4"}]'

    def _check_row(self, row: Row, config: Any, folders: Sequence[Path]) -> None:
        """Check the columns of a text, a prompt with a response, or a chat."""
        check_lm_row(read_media(row, lm_columns_of(row), folders)[0])


class RewardModelTraining(RowsRun):
    """Training of a reward model on pairs: dicts with `chosen`, `rejected` and usually `prompt`.

    It is the command `verl-like reward-model`. For example, on one pair:

        pair = {"prompt": "Hi", "chosen": "Hello!", "rejected": "?"}
        RewardModelTraining("Qwen/Qwen3-0.6B", [pair]).fit()
    """

    _recipe_path = "trainer.reward_model.recipe.REWARD_MODEL"
    _example = PAIR

    def _check_row(self, row: Row, config: Any, folders: Sequence[Path]) -> None:
        """Check the columns of a pair."""
        check_pair(read_media(row, pair_columns_of(row), folders)[0])


class DPO(RowsRun):
    """Training with DPO or another preference loss, on pairs like those of `RewardModelTraining`.

    For example, with pairs for validation:

        DPO("Qwen/Qwen3-0.6B", pairs, val_pairs, lr=1e-6).fit(steps=100)
    """

    _recipe_path = "trainer.preference.recipe.DPO"
    _example = PAIR

    def _check_row(self, row: Row, config: Any, folders: Sequence[Path]) -> None:
        """Check the columns of a pair or, if the loss reads labels, of a response with a label."""
        if loss_reads(config, "desirable"):
            check_labeled(read_media(row, labeled_columns_of(row), folders)[0])
        else:
            check_pair(read_media(row, pair_columns_of(row), folders)[0])


class KTO(DPO):
    """Training with KTO on responses that have a label.

    For example, on one row:

        KTO("Qwen/Qwen3-0.6B", [{"prompt": "Hi", "completion": "Hello!", "label": True}]).fit()
    """

    _presets = {"loss": "kto"}
    _example = '[{"prompt": "Hi", "completion": "Hello!", "label": True}]'
