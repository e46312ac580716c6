"""Count the characters of rows that a tokenizer drops without a trace."""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)
TEXT_COLUMNS = ("prompt", "response", "completion", "messages", "text", "chosen", "rejected")
MOST_NAMED = 10
"""Number of characters that the warning names."""


class DroppedCharacters:
    """Counts characters for which a tokenizer has neither a token nor an unknown token.

    Example:

        dropped = DroppedCharacters(tokenizer)
        dropped.note(row)           # for each row
        dropped.warn("data.train_files")
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: set[str] = set()
        self._dropped: set[str] = set()
        self.counts: Counter[str] = Counter()

    def note(self, row: dict[str, Any], columns: tuple[str, ...] = TEXT_COLUMNS) -> None:
        """Count the characters of a row's texts."""
        for name in columns:
            self._note(row.get(name))

    def _note(self, value: Any) -> None:
        if isinstance(value, dict):
            value = [*value.values()]
        if isinstance(value, list):
            for inner in value:
                self._note(inner)
        if not isinstance(value, str):
            return
        letters = set(value)
        self._dropped |= {letter for letter in letters - self._known if self._drops(letter)}
        self._known |= letters
        for letter in letters & self._dropped:
            self.counts[letter] += value.count(letter)

    def _drops(self, letter: str) -> bool:
        """Return True if no token comes of a character; spaces and control characters may be."""
        if letter.isspace() or unicodedata.category(letter).startswith("C"):
            return False
        return not self._tokenizer(letter, add_special_tokens=False)["input_ids"]

    def warn(self, key: str) -> None:
        """Log the dropped characters of the files that the configuration's `key` names."""
        if not self.counts:
            return
        named = [f"{letter!r} ({count})" for letter, count in self.counts.most_common(MOST_NAMED)]
        more = ", ..." if len(self.counts) > MOST_NAMED else ""
        logger.warning(
            "%s: the tokenizer of %s drops %d characters, because it has neither tokens for them "
            "nor an unknown token: %s%s. The model does not see them. Use a tokenizer that has "
            "them, or replace them in the rows.",
            key,
            self._tokenizer.name_or_path,
            self.counts.total(),
            ", ".join(named),
            more,
        )
