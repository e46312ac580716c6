"""The reference's log-probs of all responses, computed once and saved in the run folder.

    inputs = {"train": hash_of(rows), "weights": weights}
    tables = load_tables(folder, start_folder, inputs)
    save_tables(folder, tables, inputs)

A table has the shape [rows, 2]. Its inputs are saved with it: a hash of the rows' tokens, a hash of
the reference's weights, and its dtype. A run takes tables with the same inputs from its folder, or,
if it resumes, from the run folder of the checkpoint. It computes other tables again, except that a
resumed run is rejected if the inputs of its training table differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from trainer.data.lm_rows import LMRow
from verl_like.errors import CheckpointError
from verl_like.files import write_whole

FILE = "reference.safetensors"


def hash_of(rows: Iterable[LMRow]) -> str:
    """Return a hash of the rows' tokens, loss masks and images."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.ids).to_bytes(8, "little"))
        digest.update(row.ids.tobytes())
        digest.update(row.in_loss.tobytes())
        for image in row.images:
            digest.update(image.sha.encode())
    return digest.hexdigest()


def load_tables(folder: Path, start: Path | None, inputs: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the saved tables with the same inputs; raise if a resumed run trains on others.

    `inputs` maps the name of a table to the hash of its rows, and `weights` to the reference's.
    `start` is the run folder of the checkpoint to resume from, if there is one.
    """
    source = (start or folder) / FILE
    if not source.is_file():
        return {}
    try:
        with safe_open(source, framework="pt") as opened:
            stored = {name: opened.get_tensor(name) for name in opened.keys()}
            before = dict(opened.metadata())
    except SafetensorError as error:
        raise CheckpointError(
            f"{source} is damaged ({error}). Remove it, so that its log-probs are computed again."
        ) from error

    are_same_weights = before["weights"] == inputs["weights"]
    tables = {
        name: table
        for name, table in stored.items()
        if are_same_weights and inputs.get(name) == before[name]
    }
    if start is not None and "train" in stored and "train" not in tables:
        change = "rows of data.train_files"
        if not are_same_weights:
            change = "reference's weights or model.compute_dtype"
        raise CheckpointError(
            f"{source} holds log-probs of other inputs: the {change} have changed. Restore the "
            f"{change} that the run started with, or start again in another "
            "trainer.default_local_dir."
        )
    return tables


def save_tables(folder: Path, tables: Mapping[str, Tensor], inputs: Mapping[str, str]) -> None:
    """Save the tables with their inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: table.contiguous() for name, table in tables.items()}
    write_whole(folder / FILE, save(contiguous, metadata=dict(inputs)))
