"""The reference's log-probs of every response: computed once, and kept in the run folder.

    kept = KeptLogProbs(run_folder, start_folder)
    tables = kept.tables({"train": hash_of(rows)}, weights, compute)

A table is [rows, 2]. What it was made of stands beside it: a hash of the rows' tokens, and one of
the reference's weights with the type that it computes in. A run takes its tables from the folder of
the checkpoint that it goes on from; where they were made of something else, it does not go on. A
run from the start computes them anew.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.data.encoded_rows import LMRow
from verl_like.errors import CheckpointError
from verl_like.files import sync_folder

FILE = "reference.safetensors"
logger = logging.getLogger(__name__)


def hash_of(rows: Iterable[LMRow]) -> str:
    """A hash of the rows' tokens, and of which of them are in the loss."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.ids).to_bytes(8, "little"))
        digest.update(row.ids.tobytes())
        digest.update(row.in_loss.tobytes())
    return digest.hexdigest()


class KeptLogProbs:
    """The file of a run's tables."""

    def __init__(self, folder: Path, start: Path | None) -> None:
        """`start` is the run folder that the checkpoint to go on from lies in, if there is one."""
        self.file = folder / FILE
        self.source = self.file if start is None else start / FILE
        self.resumes = start is not None

    def tables(
        self, rows: Mapping[str, str], weights: str, compute: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """Name -> table, for each name with its hash of `rows`; computed where it is not kept."""
        kept, made_of = _read(self.source)
        if made_of.get("weights", weights) != weights:
            self._refuse_to_resume("the reference's weights are other ones now")
            kept = {}

        tables = {}
        for name, digest in rows.items():
            if name in kept and made_of[name] == digest:
                tables[name] = kept[name]
                continue
            if name == "train" and name in kept:
                self._refuse_to_resume("the rows of data.train_files are other ones now")
            tables[name] = compute(name)
        _write(self.file, tables, {**rows, "weights": weights})
        return tables

    def _refuse_to_resume(self, why: str) -> None:
        if self.resumes:
            raise CheckpointError(
                f"{self.source} holds log-probs of another reference: {why}. Put back what the run "
                "started with, or start anew in another trainer.default_local_dir."
            )
        logger.info("%s is of an earlier run, and written anew: %s", self.source, why)


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tables of a file, and what each was made of; nothing where there is no file."""
    if not file.is_file():
        return {}, {}
    try:
        with safe_open(file, framework="pt") as opened:
            tables = {name: opened.get_tensor(name) for name in opened.keys()}
            return tables, dict(opened.metadata())
    except SafetensorError as error:
        raise CheckpointError(
            f"{file} is damaged ({error}). Remove it: its log-probs are then computed anew."
        ) from error


def _write(file: Path, tables: Mapping[str, Tensor], made_of: Mapping[str, str]) -> None:
    """Whole or not at all."""
    draft = file.with_name(f"{file.name}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: table.contiguous() for name, table in tables.items()}, draft, metadata=dict(made_of)
    )
    draft.replace(file)
    sync_folder(file.parent)
