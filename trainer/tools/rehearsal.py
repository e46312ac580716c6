"""Run two small steps of a job on this machine's CPU, resume it for a third, and export its model.

    rehearse(config)        # `verl-like check --rehearse`

The job is the user's (`small_config` says what is smaller). An error of the
run is raised as the run raises it, with a note that names the phase of the rehearsal. Everything is
written into a temporary folder, which is removed.

    small = small_config(config, folder)        # writes stand-ins of its models into `folder`

It has the data, template, tokenizer, image processor, reward, environment, losses, trainer class,
roles, LoRA and order of pools of the job. Models, batches, lengths and the number of ranks are
smaller, the engine is not vLLM, and every output folder is another.
"""

from __future__ import annotations

import copy
import math
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch

from trainer.config.keys import leaves_of
from trainer.config.schema import RunConfig
from trainer.launch import run_steps, trainer_class
from trainer.rollouts.preflight import synthetic_responses
from trainer.rollouts.reward_trial import describe_responses
from trainer.run_folder.saved_model import find_saved_model
from trainer.tools.check_loss import BrokenRelation, check_loss
from trainer.tools.check_loss.relations import NAMES
from trainer.tools.small_models import LENGTHS, MAX_PARAMETERS, VOCABULARIES, shrunk
from verl_like.batch.protocol import DataProto
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError, RewardError, WaitTimeoutError
from verl_like.placement.pools import expand_roles
from workers.agents.trajectory import MAX_TURNS
from workers.columns import TRAJECTORY
from workers.config import ParallelConfig, RolloutConfig, has_environment
from workers.config.conditions import is_bare_config
from workers.models.causal_lm import MODEL_ERRORS
from workers.models.classes import model_class
from workers.models.folder import SMALL_FILES, model_folder, read_hf_config
from workers.rollout.native.module_forward import can_decode

MAX_VALIDATION_ROWS, SCORED_AT_ONCE = 8, 64
SCORING_S = 30.0
"""Seconds in which the reward functions score as many rows as they can, beyond the first."""
OF_THE_MASK = ("prompt_tokens", "numbers_outside")
"""The relations of `check_loss` that hold for every loss that applies its mask."""
LIMIT_S = 600
"""Seconds after which a rehearsal that does not end is stopped."""
NOT_TRIED = (
    "GPUs and their memory, NCCL, kernels for GPUs, and several nodes",
    "the weights of your models, and whether they learn",
    "long responses and full batches",
)


class Watch:
    """Observer of the phases of a run, which looks at more rewards and numbers than the run."""

    def __init__(self, run: str, scores_rows: bool) -> None:
        self.run, self.phase, self._scores_rows = run, "before its first step", scores_rows
        self.validated = self.num_scored = self.num_rows = 0
        self.ended: Counter[str] = Counter()
        """Reason -> number of trajectories that ended for it."""

    def on_init_end(self, trainer: Any) -> None:
        """Try the rewards."""
        loader: Any = getattr(trainer, "loader", None)
        if self._scores_rows and hasattr(trainer, "rollouts") and hasattr(loader, "prompts"):
            self.phase = "as the reward scored the ground truths of further rows"
            self._score(trainer, loader.prompts)
        self.phase = "before its first step"

    def _score(self, trainer: Any, prompts: Any) -> None:
        """Score ground truths as responses with each reward function; raise if one fails.

        The first rows are spread over all of them. The others follow while there is time.
        """
        rewards, width = trainer.rollouts.rewards, trainer.config.data.max_response_length
        parts = [part for part in rewards.parts if part.manager and part.config.kind == "function"]
        self.num_rows, began = len(prompts), time.monotonic()
        first = np.linspace(0, len(prompts) - 1, min(len(prompts), SCORED_AT_ONCE)).astype(int)
        order = [*dict.fromkeys([*first.tolist(), *range(len(prompts))])]
        while parts and self.num_scored < len(order):
            places = order[self.num_scored : self.num_scored + SCORED_AT_ONCE]
            rows = prompts.rows[places].tolist()
            batch = synthetic_responses(prompts, rows, trainer.rollouts.tokenizer, width)
            for part in parts:
                scored = part.manager.remote(batch).result()
                if scored.note:
                    raise ConfigError(f"{part.config.label}: {scored.note}")
                if scored.failures and part.config.on_failure != "skip":
                    count = sum(failure.count for failure in scored.failures.values())
                    texts = "".join(f"\n  {failure}" for failure in scored.failures.values())
                    raise RewardError(
                        f"{part.config.label} failed for {count} of "
                        f"{describe_responses(batch)}:{texts}"
                    )
            self.num_scored += len(rows)
            if time.monotonic() - began > SCORING_S:
                break

    def on_step_begin(self, trainer: Any) -> None:
        """Note the step."""
        self.phase = f"in step {trainer.global_step}"

    def on_stage_begin(self, trainer: Any, stage: str, batch: Any) -> None:
        """Note the stage."""
        self.phase = f"in the stage {stage!r} of step {trainer.global_step}"

    def on_sample_end(self, trainer: Any, batch: DataProto) -> None:
        """Count how the trajectories of environments ended."""
        self.ended.update(info["ended"] for info in batch.non_tensor_batch.get(TRAJECTORY, ()))

    def on_validate_begin(self, trainer: Any) -> None:
        """Note the validation."""
        self.phase = f"in the validation after step {trainer.global_step}"

    def on_validate_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Note that the validation is over."""
        self.validated += 1
        self.phase = f"after the validation of step {trainer.global_step}"

    def on_step_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Reject skipped updates, losses that are not finite, and entries that are ignored."""
        step = trainer.global_step
        for name, value in metrics.items():
            if name.endswith("/num_ignored"):
                words = "rewards with entries that JSON cannot write. The log names them"
                raise ConfigError(f"{name} is {value:g} in step {step}: {words}.")
            is_loss = name.endswith(("loss", "grad_norm")) and not math.isfinite(value)
            if is_loss or (name.endswith("/skipped_steps") and value > 0):
                raise ConfigError(
                    f"{name} is {value:g} in step {step}: a loss or its gradient is not a finite "
                    "number. Look at the loss, the advantages and the rewards of this step."
                )
        self.phase = f"after step {step}, as its metrics and its checkpoint were written"


def rehearse(config: RunConfig) -> list[str]:
    """Rehearse the run, and return lines that say what was tried and what was not."""
    trainer_cls, began = trainer_class(config), time.monotonic()
    lines, ended = list[str](), Counter[str]()
    with phase("as your loss was tried on tokens outside the mask"):
        lines += try_mask(config)
    with tempfile.TemporaryDirectory(prefix="rehearsal_") as name, time_limit():
        folder = Path(name)
        with phase("as the small models were built"):
            small = small_config(config, folder)
        for run, steps in (("the run", STEPS), ("the resumed run", STEPS + 1)):
            watch = Watch(run, scores_rows=steps == STEPS)
            with phase(watch):
                part = replace_keys(small, {"trainer.total_training_steps": steps})
                result = run_steps(part, observers=[watch], shorten=with_short_validation)
            if not result.metrics:
                raise ConfigError(
                    f"the rehearsal ended {watch.phase}, without a step: there are no samples to "
                    "train on."
                )
            lines += describe_run(watch, [int(line["step"]) for line in result.metrics])
            ended += watch.ended
        if ended:
            lines.append(describe_ends(ended))
        if trainer_cls.recipe.exports_model(config):
            with phase("as the trained model was exported and loaded again"):
                export_and_load(folder)
            lines.append("export: the trained model was written, and transformers loads it")
    shown = [f"Rehearsal: passed in {time.monotonic() - began:.0f} s, on CPUs, with small models"]
    shown += [f"  {line}" for line in lines]
    shown += ["Not tried:", *(f"  {line}" for line in (*NOT_TRIED, *not_tried(config)))]
    return shown


def with_short_validation(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a trainer's inputs with few validation rows."""
    for item in inputs:
        prompts = getattr(item, "validation", None)
        if prompts is not None:
            prompts.rows = prompts.rows[:MAX_VALIDATION_ROWS]
    return tuple(item[:MAX_VALIDATION_ROWS] if isinstance(item, list) else item for item in inputs)


def describe_run(watch: Watch, steps: Sequence[int]) -> list[str]:
    """Return what a run did, by its observer and the numbers of its steps."""
    lines = [f"{watch.run}: steps to {max(steps)}, with a checkpoint of each"]
    if watch.num_scored:
        rows = f"{watch.num_scored:,} of {watch.num_rows:,} rows"
        lines.append(f"reward: ground truths (or else prompts) of {rows}, and the responses")
    if watch.validated:
        lines.append(f"validation: {watch.validated} of at most {MAX_VALIDATION_ROWS} rows each")
    return lines


ENDS = {
    "terminated": "by the environment",
    MAX_TURNS: "by environment.max_turns",
    "length": "by the length limit",
    "deadline": "by a deadline",
    "environment": "by a failure of the environment",
}
"""End of a trajectory -> its description."""


def describe_ends(ended: Counter[str]) -> str:
    """Return which share of the trajectories ended for each reason."""
    total = ended.total()
    shares = [f"{count / total:.0%} {ENDS.get(end, end)}" for end, count in ended.most_common()]
    line = f"environment: {total} trajectories ended, {', '.join(shares)}"
    if ended["terminated"]:
        return line
    return (
        f"{line}. warning: the environment itself ended none. A model with random weights may not "
        "reach its end; otherwise return TrajectoryEnd (try: verl-like check-environment)"
    )


def try_mask(config: Any) -> list[str]:
    """Reject a policy loss of the user that tokens outside the mask change."""
    policy = getattr(config, "actor_rollout_ref", None)
    name = "" if policy is None else policy.actor.policy_loss.loss_mode
    if not re.search("[.:]", name):
        return []
    try:
        check_loss(name, "policy", skip=[other for other in NAMES if other not in OF_THE_MASK])
    except BrokenRelation as error:
        raise ConfigError(
            f"{error}\nTo try all relations that a loss keeps: verl-like check-loss {name}"
        ) from error
    except ConfigError as error:  # the steps call it with all of its arguments
        reason = str(error).partition("\n")[0]
        return [f"loss: tokens outside the mask were not tried, because {reason}"]
    return ["loss: tokens outside the mask have no effect"]


def not_tried(config: Any) -> list[str]:
    """Return what this run would do and its rehearsal did not."""
    lines = []
    if config.trainer.backend == "ray":
        lines.append("Ray: the processes were those of trainer.backend=local")
    if config.trainer.logger:
        lines.append(f"trainer.logger: {', '.join(config.trainer.logger)}")
    if config.trainer.resume_mode == "resume_path":
        lines.append(f"the start from trainer.resume_from_path={config.trainer.resume_from_path}")
    policy = getattr(config, "actor_rollout_ref", None)
    if policy is not None and policy.rollout.name == "vllm":
        lines.append("vLLM: the engine native or hf generated")
    if has_environment(config) and config.environment.tools:
        lines.append("tools: a model with random weights calls none")
    return lines


def export_and_load(folder: Path) -> None:
    """Export the newest checkpoint's model, and load it in transformers."""
    from workers.models.folder import read_hf_config

    checkpoint = max((folder / "run").glob("global_step_*"), key=lambda path: path.stat().st_mtime)
    out = folder / "exported"
    find_saved_model(checkpoint).export(out)
    cls = class_of(read_hf_config(out))
    _, report = cls.from_pretrained(out, dtype="auto", output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"the exported model lacks {len(missing)} weights of {cls.__name__}: "
            f"{', '.join(missing[:5])}. from_pretrained would make them random."
        )


@contextmanager
def phase(now: str | Watch) -> Iterator[None]:
    """Add the phase of the rehearsal to an error of the block."""
    try:
        yield
    except Exception as error:
        words = now if isinstance(now, str) else f"in {now.run}, {now.phase}"
        strict = " It allows no failed sample." if isinstance(error, RewardError) else ""
        error.add_note(f"The rehearsal failed {words}.{strict}")
        raise


@contextmanager
def time_limit(seconds: float = LIMIT_S) -> Iterator[None]:
    """Interrupt a block that hangs, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown place"
        raise WaitTimeoutError(
            f"the rehearsal did not end within {seconds:g} s; it was at {where}. A reward, an "
            "environment or a stage may wait for something that does not come."
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


C = TypeVar("C", bound=RunConfig)
STEPS = 2
SAMPLES, MAX_PER_PROMPT, ROWS = 32, 16, 4
"""Samples per step (more if 4 prompts have more), samples per prompt, and rows per step."""
RESPONSE, RESPONSE_OF_TURNS, TURN, TURNS = 16, 512, 8, 8
"""Longest response without and with an environment, and a turn's tokens, and turns."""
RESUMES = ("model", "optimizer", "extra")
"""Contents of a checkpoint with which a run resumes with equal numbers."""
AXES = ("tp", "sp", "pp", "ep")
PLAIN: dict[str, Any] = {
    "attn_implementation": "auto",
    "compile": "off",
    "param_offload": None,
    "optimizer_offload": None,
    "fsdp_size": -1,
}
"""Key of any section -> its value on CPUs."""
AT_MOST = {
    "micro_batch_size_per_gpu": ROWS,
    "ppo_micro_batch_size_per_gpu": ROWS,
    "log_prob_micro_batch_size_per_gpu": ROWS,
    "max_num_seqs": 2 * SAMPLES,
    "kv_cache_gib": 0.5,
    "max_num_gen_batches": 2,
    "max_turns": TURNS,
    "critic_warmup": 1,
    "update_every": 1,
}
"""Key of any section -> its largest value."""
COMMON_SETTINGS: dict[str, Any] = {
    "trainer.device": "cpu",
    "trainer.backend": "local",
    "trainer.simulate": None,
    "trainer.dry_run": True,  # reads only the first rows of large files
    "trainer.nnodes": 1,
    "trainer.total_epochs": None,
    "trainer.total_training_steps": STEPS,
    "trainer.save_freq": 1,
    "trainer.logger": [],
    "trainer.stop_at": {},
    "trainer.max_restarts": 0,
    "trainer.resume_mode": "auto",
    "trainer.resume_from_path": None,
    "cpus_per_process": None,
    "pool_resources": {},
}
SAMPLING_SETTINGS: dict[str, Any] = {
    "data.total_prompts": None,
    "reward.max_failed_fraction": 0.0,
    "environment.max_failed_fraction": 0.0,
    "actor_rollout_ref.rollout.server_urls": [],
    "actor_rollout_ref.rollout.engine_kwargs": {},
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
}
ASYNC_SETTINGS: dict[str, Any] = {
    "async_training.sample_routes": None,
    "async_training.weight_routes": None,
    "async_training.prompts_per_call": None,
    "async_training.max_inflight_samples": None,
    "async_training.generator_settings": {},
}


def small_config(config: C, folder: Path) -> C:
    """Return the configuration of the rehearsal, which writes only into `folder`."""
    changes = COMMON_SETTINGS | {"trainer.default_local_dir": str(folder / "run")}
    models: dict[str, str] = {}

    def small_model(path: str) -> str:
        if path not in models:
            models[path] = str(write_stand_in(path, folder / f"model_{len(models)}"))
        return models[path]

    for key, section in leaves_of(config):
        value = getattr(section, key.leaf)
        if value and key.name.endswith(("model.path", "model_path")):
            changes[key.name] = small_model(value)
        elif key.leaf in PLAIN:
            changes[key.name] = PLAIN[key.leaf]
        elif key.leaf in AT_MOST and value is not None:
            changes[key.name] = min(value, AT_MOST[key.leaf])
        elif key.leaf == "strategy":
            changes[key.name] = value.removesuffix("+offload").removesuffix("_offload")
        elif key.leaf == "save_contents":
            changes[key.name] = [*value, *(part for part in RESUMES if part not in value)]
        elif key.leaf == "fsdp_config":
            changes[key.name] = {}
        elif key.leaf == "quantization" and value == "fp8":
            changes[key.name] = None
        elif key.leaf == "parallel" and value:
            of_run = vars(getattr(config, "parallel", ParallelConfig()))
            changes[key.name] = value | folded(of_run | value)
    parallel = getattr(config, "parallel", None)
    if isinstance(parallel, ParallelConfig):
        changes |= {f"parallel.{axis}": size for axis, size in folded(vars(parallel)).items()}
    changes |= _sizes(config)
    policy = getattr(config, "actor_rollout_ref", None)
    if policy is not None and policy.rollout.name == "vllm":
        width = config.data.max_prompt_length + changes["data.max_response_length"]  # type: ignore[attr-defined]
        is_native = can_decode(read_hf_config(small_model(policy.model.path)), width)
        changes["actor_rollout_ref.rollout.name"] = "native" if is_native else "hf"
    rewards = list(config.reward.list) if hasattr(config, "reward") else []
    for number, reward in enumerate(rewards):
        if reward.kind == "model":
            rewards[number] = replace_keys(reward, {"path": small_model(reward.path)})
        changes["reward.list"] = rewards
    return replace_keys(_with_few_ranks(config), changes)


def folded(axes: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of parallel axes on two ranks: the first axis in use gets both."""
    used = next((axis for axis in AXES if axes.get(axis, 1) > 1), "")
    return {"shard": -1, **{axis: 2 if axis == used else 1 for axis in AXES}}


def _with_few_ranks(config: C) -> C:
    """Return the configuration with at most two ranks per pool; one if there are many pools."""
    spec, pools = config.resource_pool_spec, expand_roles(config.role_mapping)
    of_run = vars(getattr(config, "parallel", ParallelConfig()))
    split = {
        pool
        for role, pool in pools.items()
        if max(folded(of_run | _axes_of(config, role)).values()) > 1
    }
    sizes = {
        pool: [min(2 if len(spec) < 3 or pool in split else 1, sum(nodes))]
        for pool, nodes in spec.items()
    }
    changes: dict[str, Any] = {
        "resource_pool_spec": sizes,
        "trainer.n_gpus_per_node": sum(map(sum, sizes.values())),
    }
    if hasattr(config, "async_training"):
        trainers = sizes[pools["actor"]][0]
        changes |= ASYNC_SETTINGS | {"async_training.trainers": trainers}
    return replace_keys(config, changes)


def _axes_of(config: RunConfig, role: str) -> dict[str, Any]:
    """Return the axes that a role sets for itself."""
    policy = getattr(config, "actor_rollout_ref", None)
    section = getattr(config, role, None) or getattr(policy, role, None)
    return getattr(section, "parallel", None) or {}


def _sizes(config: Any) -> dict[str, Any]:
    """Return the sizes of batches, lengths and mini-batches, with the divisors of the user's."""
    data, batch = config.data, config.data.train_batch_size
    if not hasattr(config, "actor_rollout_ref"):
        return {"data.train_batch_size": min(batch, ROWS)}
    rollout: RolloutConfig = config.actor_rollout_ref.rollout
    n = min(rollout.n, MAX_PER_PROMPT)
    prompts = min(batch, max(4, SAMPLES // n // 4 * 4))
    longest = RESPONSE_OF_TURNS if has_environment(config) else RESPONSE
    response, penalty = min(data.max_response_length, longest), config.reward.overlong_penalty
    changes = SAMPLING_SETTINGS | {
        "data.train_batch_size": prompts,
        "data.max_response_length": response,
        "actor_rollout_ref.rollout.n": n,
    }
    if "n" in rollout.val_kwargs:
        changes["actor_rollout_ref.rollout.val_kwargs.n"] = min(rollout.val_kwargs["n"], 2)
    if "min_tokens" in rollout.sampling_kwargs:
        least = min(rollout.sampling_kwargs["min_tokens"], response)
        changes["actor_rollout_ref.rollout.sampling_kwargs.min_tokens"] = least
    if has_environment(config):
        turn = config.environment.max_tokens_per_turn or TURN
        changes["environment.max_tokens_per_turn"] = min(turn, TURN)
    if penalty.len > response:
        changes["reward.overlong_penalty.len"] = response
    for key, section in leaves_of(config):
        if key.leaf == "ppo_mini_batch_size" and section.ppo_mini_batch_size:
            is_single = section.ppo_mini_batch_size >= batch or prompts < 4 or prompts % 2
            changes[key.name] = prompts if is_single else prompts // 2
    if getattr(config, "ptx", None) is not None and config.ptx.batch_size:
        changes["ptx.batch_size"] = min(config.ptx.batch_size, ROWS)
    return changes


def write_stand_in(path: str, out: Path) -> Path:
    """Write a tiny model of the class of the model at `path`, with its tokenizer and template.

    It has the vocabulary, special tokens and positions of the model, and random weights. A folder
    without weights stays without.
    """
    folder = model_folder(path, weights=False)
    config = read_hf_config(folder)
    small = _small(config, path)
    small.architectures = config.architectures
    if is_bare_config(path):
        small.save_pretrained(out)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = class_of(config)._from_config(small, dtype=torch.float32)
        model.save_pretrained(out)
    for file in (file for pattern in SMALL_FILES for file in folder.glob(pattern)):
        if file.name != "config.json" and not file.name.endswith(".index.json"):
            shutil.copyfile(file, out / file.name)
    return out


def _small(config: Any, path: str) -> Any:
    """Return the config of the tiny model, with narrow layers if the class allows it."""
    from huggingface_hub.errors import StrictDataclassError

    failures, wide = [], copy.deepcopy(config)
    text = wide.get_text_config()
    if getattr(text, "use_sliding_window", None) is False:
        text.max_window_layers = 1  # no layer has a window, so two layers have every kind
    for with_widths in (True, False):
        try:
            small = shrunk(wide, with_widths)
            _keep_tokens(config, small)
            with torch.device("meta"):
                size = class_of(config)._from_config(small).num_parameters()
            if size <= 2 * MAX_PARAMETERS:
                return small
            failures.append(f"its smallest model has {size:,} parameters")
        except (*MODEL_ERRORS, StrictDataclassError) as error:
            failures.append(f"{type(error).__name__}: {error}")
    raise ConfigError(
        f"--rehearse: no small model of the class of {path!r} could be built "
        f"({failures[0].splitlines()[0]}). Leave out --rehearse, which needs one."
    )


def _keep_tokens(config: Any, small: Any) -> None:
    """Give the small config the vocabulary, token ids and positions of the model's config."""
    for name, value in config.to_dict().items():
        part = getattr(config, name, None)
        if name in config.sub_configs and part is not None:
            _keep_tokens(part, getattr(small, name))
        elif (
            name in (*VOCABULARIES, *LENGTHS) or "token_id" in name or name.endswith("token_index")
        ):
            setattr(small, name, value)


def class_of(config: Any) -> Any:
    """Return the class that the folder names, or the language model of its type."""
    import transformers

    return getattr(transformers, (config.architectures or [""])[0], None) or model_class(config)
