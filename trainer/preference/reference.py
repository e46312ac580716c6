"""The reference's log-probs of all responses, computed once and saved in the run folder.

    tables = load_or_compute(folder, start_folder, {"train": hash_of(rows)}, weights, compute)

A table has the shape [rows, 2]. Its inputs are saved with it: a hash of the rows' tokens, a hash of
the reference's weights, and its dtype. A run takes tables with the same inputs from its folder, or,
if it resumes, from the run folder of the checkpoint. It computes other tables again, except that a
resumed run is rejected if the inputs of its training table differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from trainer.data.lm_rows import LMRow
from verl_like.errors import CheckpointError
from verl_like.files import write_whole

FILE = "reference.safetensors"


def hash_of(rows: Iterable[LMRow]) -> str:
    """Return a hash of the rows' tokens and loss masks."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.ids).to_bytes(8, "little"))
        digest.update(row.ids.tobytes())
        digest.update(row.in_loss.tobytes())
    return digest.hexdigest()


def load_or_compute(
    folder: Path,
    start: Path | None,
    rows: Mapping[str, str],
    weights: str,
    compute: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """Return the table of each name in `rows`, which maps names to hashes.

    `start` is the run folder of the checkpoint to resume from, if there is one.
    """
    source = (start or folder) / FILE
    stored, inputs = _read(source)
    are_same_weights = inputs.get("weights") == weights
    tables = {}
    for name, digest in rows.items():
        if name in stored and are_same_weights and inputs[name] == digest:
            tables[name] = stored[name]
            continue
        if name == "train" and name in stored and start is not None:
            change = "rows of data.train_files"
            if not are_same_weights:
                change = "reference's weights or model.compute_dtype"
            raise CheckpointError(
                f"{source} holds log-probs of other inputs: the {change} have changed. Restore the "
                f"{change} that the run started with, or start again in another "
                "trainer.default_local_dir."
            )
        tables[name] = compute(name)

    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: table.contiguous() for name, table in tables.items()}
    write_whole(folder / FILE, save(contiguous, metadata={**rows, "weights": weights}))
    return tables


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tables in a file and the inputs of each; both are {} if there is no file."""
    if not file.is_file():
        return {}, {}
    try:
        with safe_open(file, framework="pt") as opened:
            tables = {name: opened.get_tensor(name) for name in opened.keys()}
            return tables, dict(opened.metadata())
    except SafetensorError as error:
        raise CheckpointError(
            f"{file} is damaged ({error}). Remove it, so that its log-probs are computed again."
        ) from error
