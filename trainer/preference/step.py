"""Preference training: `trainer.rows` on pairs of responses, or on responses labeled good or bad.

    reference of all rows, once ─> rows ─> (KTO: KL on mismatched responses) ─> update ─> next rows

The reference is the model before training, or a separate model in the role `ref`. Its log-probs are
computed before a checkpoint is loaded, so a resumed run has the same reference.

A table of log-probs has the shape [rows, 2], and is saved in the run folder with its inputs: a hash
of the rows' tokens, a hash of the reference's weights, and its dtype. A run takes tables with the
same inputs from its folder, or, if it resumes, from the run folder of the checkpoint. It computes
other tables again, except that a resumed run is rejected if the inputs of its training table
differ.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from trainer.data.files import row_limit
from trainer.data.lm_rows import STUB_ROW, LMRow
from trainer.data.pairs import (
    LabeledRow,
    PairRow,
    labeled_batch,
    pair_batch,
    read_labeled,
    read_pairs,
)
from trainer.preference.recipe import PreferenceConfig
from trainer.rows.trainer import ROWS_RUN, RowTrainer, longest_row
from trainer.run_state import Metrics
from verl_like.batch.protocol import DataProto
from verl_like.errors import CheckpointError
from verl_like.files import write_atomic
from workers.columns import read_columns, write_columns
from workers.config.rows import has_reference, has_sft_length, loss_reads
from workers.losses.preference import SFT_LENGTH, measures

logger = logging.getLogger(__name__)

NumberedRow = tuple[int, PairRow | LabeledRow]
"""(row number, row); the number selects the reference's log-probs."""


def with_mismatched(rows: Sequence[NumberedRow]) -> list[NumberedRow]:
    """Replace each row's response with its mismatched response."""
    result: list[NumberedRow] = []
    for number, row in rows:
        assert isinstance(row, LabeledRow), "pairs have no mismatched response"
        result.append((number, replace(row, response=row.mismatched)))
    return result


def both_sides(rows: Sequence[NumberedRow]) -> Iterator[LMRow]:
    """Yield every sequence that the reference scores."""
    for _, row in rows:
        yield from row.sides.values()


def labeled_columns(
    mismatched: Tensor, ref_mismatched: Tensor, desirable: Tensor
) -> dict[str, Tensor]:
    """Return the columns `desirable`, `mismatched_kl` and `label_share` of labeled rows.

    The KL is estimated by the mean log-ratio of the mismatched responses, clamped at zero.
    """
    kl = (mismatched - ref_mismatched).mean().clamp(min=0)
    share = desirable.double().mean()
    return {
        "desirable": desirable,
        "mismatched_kl": kl.expand(len(desirable)).clone(),
        "label_share": torch.where(desirable, share, 1 - share),
    }


def sft_length(num_tokens: Tensor) -> Tensor:
    """Return the mean number of tokens of the chosen responses, for each pair."""
    return num_tokens[:, 0].double().mean().expand(len(num_tokens)).clone()


ROUNDING = 1e-6
"""Rounding tolerance for the fraction `desirable`; one row is a larger fraction."""


class PreferenceTrainer(RowTrainer[NumberedRow]):
    """Trains the role `preference` relative to a reference, if the loss has one."""

    config: PreferenceConfig
    recipe = replace(ROWS_RUN, role="preference", stages=("data", "mismatched_kl", "update"))
    stub_rows = (0, LabeledRow(STUB_ROW, STUB_ROW, True)), (0, PairRow(STUB_ROW, STUB_ROW))
    reference: dict[str, Tensor]
    """Log-probs [rows, 2] of `train` and `val` rows: (chosen, rejected) or (own, mismatched)."""

    @classmethod
    def read_rows(
        cls, config: PreferenceConfig, key: str, files: Any, tokenizer: Any
    ) -> list[NumberedRow]:
        """Return pairs or labeled responses, as the loss needs."""
        length, on_bad_row, limit = longest_row(config), config.data.on_bad_row, row_limit(config)
        if loss_reads(config, "desirable"):
            seed = config.trainer.seed
            labeled = read_labeled(key, files, tokenizer, length, seed, on_bad_row, limit)
            return list(enumerate(labeled))
        pairs = read_pairs(key, files, tokenizer, length, on_bad_row, limit)
        if any(pair.margin for pair in pairs) and not loss_reads(config, "margin"):
            logger.info("%s: loss=%s does not read the margins of pairs", key, config.loss)
        return list(enumerate(pairs))

    @staticmethod
    def make_batch(
        rows: Sequence[NumberedRow], uids: Sequence[str], pad_token_id: int
    ) -> DataProto:
        """Pad rows on the right, each with its `row_number`."""
        numbers, of_files = zip(*rows, strict=True)
        make = labeled_batch if isinstance(of_files[0], LabeledRow) else pair_batch
        batch = make(of_files, uids, pad_token_id)
        return write_columns(batch, row_number=torch.tensor(numbers))

    # ------------------------------------------------------------------------------- the reference

    def before_resume(self) -> None:
        """Load or compute the reference's log-probs, before the model loads a checkpoint."""
        self.reference = {}
        if not has_reference(self.config):
            return
        group = self.groups["ref" if "ref" in self.groups else self.recipe.role]
        rows = {"train": self.loader.rows}
        if self.has_validation:
            rows["val"] = self.validation

        start = self.run.checkpoints.resume.start
        inputs = {name: hash_of(both_sides(of_name)) for name, of_name in rows.items()}
        inputs["weights"] = f"{group.reference_checksum()[0]}, {self.config.model.compute_dtype}"
        self.reference = load_tables(self.run.folder, start and start.parent, inputs)
        for name, of_name in rows.items():
            if name not in self.reference:
                with self.clock("reference"):
                    score = group.compute_ref_log_prob
                    self.reference[name] = self.log_probs_of(of_name, name, score)
        save_tables(self.run.folder, self.reference, inputs)

    @property
    def is_labeled(self) -> bool:
        """True if the loss takes labeled responses, not pairs."""
        return loss_reads(self.config, "desirable")

    def log_probs_of(self, rows: Sequence[NumberedRow], name: str, score: Any) -> Tensor:
        """Return the log-probs [rows, 2] that the workers' method `score` computes."""
        matched = self.scored(rows, name, score)
        if not self.is_labeled:
            return matched
        mismatched = self.scored(with_mismatched(rows), name, score)
        return torch.stack([matched, mismatched], dim=1)

    def scored(self, rows: Sequence[NumberedRow], name: str, score: Any) -> Tensor:
        """Return the results of the workers' method `score` for these rows in order."""
        log_probs = []
        for batch in self.in_order(rows, name):
            columns = read_columns(score(batch), "response_log_probs")
            log_probs.append(columns["response_log_probs"])
        return torch.cat(log_probs)

    # --------------------------------------------------------------------------------------- a step

    def step(self) -> Metrics:
        """Make one optimizer step on the next rows, and return the metrics."""
        return reported_metrics(super().step(), "train")

    def with_columns(self, batch: DataProto) -> DataProto:
        """Add the reference's log-probs and the columns that depend on the whole batch."""
        if has_sft_length(self.config):
            mask = read_columns(batch, "response_mask")["response_mask"]
            batch = write_columns(batch, **{SFT_LENGTH: sft_length(mask.count_nonzero(dim=-1))})
        if not has_reference(self.config):
            return batch

        numbers = read_columns(batch, "row_number")["row_number"]
        reference = self.reference["train"][numbers]
        if not self.is_labeled:
            return write_columns(batch, ref_log_probs=reference)
        with self.clock("mismatched_kl"):
            rows = with_mismatched([self.loader.rows[number] for number in numbers.tolist()])
            group = self.groups[self.recipe.role]
            log_probs = self.scored(rows, "mismatched", group.compute_log_prob)
        desirable = read_columns(batch, "desirable")["desirable"]
        columns = labeled_columns(log_probs, reference[:, 1], desirable)
        return write_columns(batch, ref_log_probs=reference[:, 0], **columns)

    def validation_metrics(self) -> Metrics:
        """Return the metrics of a training step, averaged over all validation rows."""
        score = self.groups[self.recipe.role].compute_log_prob
        log_probs = self.log_probs_of(self.validation, "val", score)
        batches = self.in_order(self.validation, "val")
        masks = [read_columns(batch, "response_mask")["response_mask"] for batch in batches]
        num_tokens = torch.cat([mask.count_nonzero(dim=-1) for mask in masks])
        columns = {"log_probs": log_probs, "num_tokens": num_tokens.double()}
        if has_sft_length(self.config):
            columns[SFT_LENGTH] = sft_length(num_tokens)
        if has_reference(self.config):
            columns["ref_log_probs"] = self.reference["val"]

        margins = [row.margin for _, row in self.validation if isinstance(row, PairRow)]
        if margins:
            columns["margin"] = torch.tensor(margins)
        labels = [row.desirable for _, row in self.validation if isinstance(row, LabeledRow)]
        if labels:
            reference = columns["ref_log_probs"]
            columns |= {"log_probs": log_probs[:, 0], "ref_log_probs": reference[:, 0]}
            desirable = torch.tensor(labels)
            columns |= labeled_columns(log_probs[:, 1], reference[:, 1], desirable)

        metrics = measures(columns, self.config)
        return reported_metrics(
            {f"val/{name}": float(rows.mean()) for name, rows in metrics.items()}, "val"
        )


def reported_metrics(metrics: Metrics, prefix: str) -> Metrics:
    """Add the KL per token; remove the metrics of a label that no row has."""
    if f"{prefix}/kl/row" in metrics:
        per_row, length = metrics[f"{prefix}/kl/row"], metrics[f"{prefix}/lengths/mean"]
        metrics[f"{prefix}/kl/token"] = per_row / length
    share = metrics.get(f"{prefix}/desirable", 0.5)
    if ROUNDING < share < 1 - ROUNDING:
        return metrics
    absent = ("/chosen" if share < 0.5 else "/rejected", "rewards/margin")
    return {name: value for name, value in metrics.items() if not name.endswith(absent)}


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
    write_atomic(folder / FILE, save(contiguous, metadata=dict(inputs)))
