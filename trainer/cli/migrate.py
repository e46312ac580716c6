"""usage: verl-like migrate verl|openrlhf|trl|coati|chatgpt COMMAND-OR-FILE

Reads a command line, or a file that has one, and prints the same run as a command of ours. Below it
stands what became of every flag: renamed, always so here, or not here and what to do instead; and
those of its defaults that differ from ours, which the command sets.

  verl-like migrate verl run_qwen2-7b.sh                   verl.trainer.main_ppo
  verl-like migrate openrlhf train_ppo_llama_ray.sh        train_ppo_ray, both generations of flags
  verl-like migrate trl "trl grpo --config grpo.yaml"      grpo, sft, reward, dpo; also a YAML alone
  verl-like migrate coati mmmt_prompt.sh                   train_prompts, 1mmt_prompt, mmmt_prompt
  verl-like migrate chatgpt listing.py                     Python, line by line; verl, coati, too
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.migrate.systems import migrate
from verl_like.errors import ConfigError
from verl_like.terminal import terminal_width


def main(arguments: Sequence[str]) -> None:
    """Print the translation of another framework's command."""
    if len(arguments) != 2:
        sys.exit(__doc__)
    system, source = arguments
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    print(migrate(system, text_of(source)).report(terminal_width()), flush=True)


def text_of(source: str) -> str:
    """The file's text; what names no file is the command itself."""
    if "\n" in source or " " in source.strip() or not Path(source).suffix:
        return source
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; give a script, or a command in quotes.")
    return path.read_text(encoding="utf-8", errors="replace")
