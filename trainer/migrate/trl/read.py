"""A TRL command line or YAML, read into its command and the fields that it sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.migrate.command import as_flags, commands_of, read_words
from trainer.migrate.trl.flags import PROGRAMS
from verl_like.errors import ConfigError

MARKS = {
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "epsilon", "use_vllm"),
    "reward": ("center_rewards_coefficient",),
    "dpo": ("beta", "precompute_ref_log_probs", "ld_alpha", "sync_ref_model"),
    "sft": ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field"),
}
"""Fields by which a YAML without a command is known, asked in this order."""
Fields = dict[str, str]


def read(text: str) -> tuple[str, Fields]:
    """TRL's command, and field -> value; those of `--config FILE` stand behind the command's."""
    if _is_yaml(text):
        fields = _of_yaml(text)
        return _known_by_its_fields(fields), fields

    program, words = read_words(text, *PROGRAMS)
    fields = {name: " ".join(values) or "True" for name, values in as_flags(words).items()}
    fields = {name.replace("-", "_"): value for name, value in fields.items()}
    path = fields.pop("config", None)
    if path is not None:
        if not Path(path).is_file():
            raise ConfigError(f"--config {path}: there is no such file; give its own path.")
        fields = _of_yaml(Path(path).read_text(encoding="utf-8")) | fields
    fields = {"num_processes": _processes(text)} | fields
    return program or _known_by_its_fields(fields), fields


def _is_yaml(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return bool(lines) and all(":" in line for line in lines if not line.startswith((" ", "-")))


def _of_yaml(text: str) -> Fields:
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"the YAML could not be read: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError("the YAML has no `field: value` lines.")
    return {str(name): _plain(value) for name, value in tree.items() if value is not None}


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_plain, value))}]"
    return str(value)


def _known_by_its_fields(fields: Fields) -> str:
    for program, marks in MARKS.items():
        if any(mark in fields for mark in marks):
            return program
    raise ConfigError(
        f"whether this is of {', '.join(PROGRAMS)} cannot be seen by its fields; give the command, "
        "`trl grpo --config FILE`."
    )


def _processes(text: str) -> str:
    """Processes of `accelerate launch`, of `torchrun`, or one."""
    for words in commands_of(text):
        for flag, values in as_flags(words).items():
            if flag in ("num_processes", "nproc_per_node", "nproc-per-node") and values:
                return values[0]
    return "1"
