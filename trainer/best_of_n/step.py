"""Best of n: sample responses, score them, and save the best of each prompt.

    prompts ─> rollout ─> { rewards ‖ rollout of the next prompts } ─> selection ─> next prompts

Every prompt is used once. A step writes its rows to `selected/<step>.jsonl` in the run folder; at
the end of the run, these files are joined into one. A killed run therefore continues after its last
committed step. With the engines `native` and `hf` and a dense model, its result equals that of an
uninterrupted run.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer.best_of_n.recipe import BestOfNConfig
from trainer.best_of_n.selection import read_rows, select, write_rows
from trainer.data.loader import check_same_rows
from trainer.record import Metrics
from trainer.rollouts.rollouts import join_results
from trainer.rollouts.samples import repeat_prompts
from trainer.rollouts.without_training import SamplingOnlyTrainer
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError, CheckpointError, ConfigError
from verl_like.files import why_not_writable
from workers.columns import read_columns

logger = logging.getLogger(__name__)


class BestOfNTrainer(SamplingOnlyTrainer):
    """Samples all prompts with the role `rollout`, and selects among the scored samples."""

    config: BestOfNConfig
    stages = ("gen", "score", "select")
    prompt_files = "train_files"
    no_tools_reason = (
        "A trajectory becomes a row of `messages` for verl-like sft, which has no tools."
    )
    concurrent_stages = ("score",)

    ahead: DataProto | None = None
    """The samples of the next step, generated while this step's samples were scored."""

    @classmethod
    def prepare(cls, config: BestOfNConfig, at_end: ExitStack) -> tuple[Any, ...]:
        """Check that the file of selected rows can be written, and prepare the inputs."""
        folder = Path(config.selection.file).parent  # created at the end
        if problem := why_not_writable(folder):
            raise ConfigError(
                f"selection.file={config.selection.file}: cannot write a file in {folder}: "
                f"{problem}. Choose another folder."
            )
        return super().prepare(config, at_end)

    @classmethod
    def describe(
        cls, config: BestOfNConfig, max_columns: int | None = None, brief: bool = False
    ) -> list[str]:
        """Describe how many samples a step generates, and which ones it selects."""
        num_prompts, num_samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
        selection = config.selection
        selected = f"the best {selection.top_k} of each prompt"
        if selection.format == "pairs":
            selected = "the best and the worst of each prompt, as a pair"
        if selection.min_score is not None:
            selected += f", from a score of {selection.min_score:g} on"
        total = num_prompts * num_samples
        return [
            f"A step generates {total:,} samples ({num_prompts:,} prompts, {num_samples:,} each) "
            f"and keeps {selected}."
        ]

    @property
    def total_steps(self) -> int:
        """Number of batches of all prompts, or `trainer.total_training_steps` if that is fewer."""
        all_prompts = -(-len(self.prompts) // self.config.data.train_batch_size)
        return min(self.config.trainer.total_training_steps or all_prompts, all_prompts)

    @classmethod
    def all_files_written(cls, config: BestOfNConfig) -> bool:
        """Return whether the file of the selected rows exists."""
        return _file_of(config).is_file()

    def part(self, step: int) -> Path:
        """Return the file of one step's rows."""
        return self.run.folder / "selected" / f"{step}.jsonl"

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's own state, ready for JSON."""
        return super().state_dict() | self._rows()

    def _rows(self) -> dict[str, Any]:
        return {"num_prompts": len(self.prompts), "rows": self.prompts.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; raise if the prompts have changed or earlier rows are missing."""
        super().load_state_dict(state)
        check_same_rows(state, self._rows())
        for step in range(1, self.global_step + 1):
            if not self.part(step).is_file():
                raise CheckpointError(
                    f"the rows of step {step} are not in {self.part(step)}. Resume in the folder "
                    "of the run that was stopped (trainer.default_local_dir)."
                )

    def finish(self) -> None:
        """Join the rows of all steps into the result file."""
        file = _file_of(self.config)
        parts = [self.part(step) for step in range(1, self.global_step + 1)]
        rows = [row for part in parts for row in read_rows(part)]
        if not rows:
            has_limit = self.config.selection.min_score is not None
            lower = " or lower selection.min_score" if has_limit else ""
            raise BatchError(
                f"no sample was selected for {file}. Look at the samples and scores in rollouts/, "
                f"and raise actor_rollout_ref.rollout.n{lower}."
            )
        write_rows(file, rows)
        print(f"{len(rows)} rows: {file}", flush=True)

    def step(self) -> Metrics:
        """Score this step's samples while the next step's are generated, and select among them."""
        with self.clock("gen"):
            batch = self.ahead if self.ahead is not None else self.sample_prompts(self.global_step)
        with self.clock("score"):
            scores = self.rollouts.launch_rewards(batch)
            try:
                is_last = self.global_step == self.total_steps
                self.ahead = None if is_last else self.sample_prompts(self.global_step + 1)
            finally:  # an error in the rollout must not hide an error in the rewards
                batch, scored = join_results(batch, [scores.get()])
        with self.clock("select"):
            rows, selected = select(batch, self.config.selection, self.rollouts.tokenizer)
            write_rows(self.part(self.global_step), rows)
        self.rollouts.write("rollouts", batch)
        return self.batch_metrics(batch) | scored | selected

    def sample_prompts(self, step: int) -> DataProto:
        """Generate the samples of a step, which can be done ahead: the weights do not change."""
        size = self.config.data.train_batch_size
        chosen = self.prompts.rows[(step - 1) * size : step * size]
        prompts = self.prompts.batch(chosen.tolist(), epoch=0)
        num_samples = self.config.actor_rollout_ref.rollout.n
        return self.rollouts.generate(repeat_prompts(prompts, num_samples))

    def batch_metrics(self, batch: DataProto) -> Metrics:
        """Return the mean score of all samples and of the best per prompt, and the mean length."""
        columns = read_columns(batch, "token_level_scores", "response_mask")
        num_samples = self.config.actor_rollout_ref.rollout.n
        scores = columns["token_level_scores"].sum(dim=-1).double().view(-1, num_samples)
        return {
            "score/mean": scores.mean().item(),
            "score/best": scores.max(dim=-1).values.mean().item(),
            "response_length/mean": columns["response_mask"].sum(dim=-1).double().mean().item(),
            "training/global_step": self.global_step,
        }


def _file_of(config: BestOfNConfig) -> Path:
    """Return the file of the selected rows."""
    folder = Path(config.trainer.default_local_dir)
    return Path(config.selection.file or folder / "selected.jsonl")
