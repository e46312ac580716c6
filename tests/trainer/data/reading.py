"""Rows of prompts as a list, for tests."""

from __future__ import annotations

from trainer.data.config import DataConfig
from trainer.data.files import Row, good_rows, prompt_row, rows_of_prompts


def read_rows(config: DataConfig, setting: str, needs_rules: bool = True) -> tuple[list[Row], int]:
    """The good rows, and how many were skipped."""

    def make(where: str, row: Row) -> Row:
        return prompt_row(row, config.prompt_key, needs_rules)

    rows = rows_of_prompts(config, setting, None, needs_rules)
    found = list(good_rows(rows, make, config.on_bad_row))
    good = [row for row in found if row is not None]
    return good, len(found) - len(good)
