"""TRL's `grpo`, `sft`, `reward` and `dpo`, translated into commands of ours."""
