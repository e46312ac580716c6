"""A reader of the prompt rows of files, without tokens."""

from __future__ import annotations

from typing import Any

from trainer.data.config import DataConfig
from trainer.data.files import Row, good_rows, prompt_row, rows_of_prompts


def read_rows(
    config: DataConfig, setting: str, tokenizer: Any = None, needs_rules: bool = True
) -> tuple[list[Row], int]:
    """Return the rows that a run would use, and the number of rows that it would skip."""
    placed = rows_of_prompts(config, setting, tokenizer, needs_rules)
    checked = list(
        good_rows(
            placed,
            lambda _, row: prompt_row(row, config.prompt_key, needs_rules),
            config.on_bad_row,
        )
    )
    rows = [row for row in checked if row is not None]
    return rows, len(checked) - len(rows)
