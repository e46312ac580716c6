"""Supervised fine-tuning: `trainer.rows` on texts, responses and chats, with a validation loss.

`trainer.data.lm_rows` describes the rows and their loss masks.
"""

from __future__ import annotations

from dataclasses import replace

from trainer.data.files import row_limit
from trainer.data.lm_rows import LMRow, lm_batch, read_lm_rows
from trainer.rows.trainer import ROWS_RUN, RowTrainer, longest_row, num_tokens_in_loss
from trainer.run_state import Metrics
from trainer.sft.recipe import SFTConfig
from workers.columns import read_columns


class SFTTrainer(RowTrainer[LMRow]):
    """The trainer of `verl-like sft`; `self.groups["sft"]` trains the model.

    Select a subclass by `trainer.cls=my_module.WithPerplexity`.

    Example:

        class WithPerplexity(SFTTrainer):
            def validation_metrics(self):
                metrics = super().validation_metrics()
                return metrics | {"val/perplexity": math.exp(metrics["val/loss"])}
    """

    config: SFTConfig
    recipe = replace(ROWS_RUN, role="sft")
    make_batch = staticmethod(lm_batch)

    @classmethod
    def read_rows(
        cls, config: SFTConfig, key: str, files: object, tokenizer: object
    ) -> list[LMRow]:
        """Return texts, responses or chats."""
        data = config.data
        return read_lm_rows(
            key,
            files,
            tokenizer,
            longest_row(config),
            loss_on_all=data.loss_on == "all",
            on_bad_row=data.on_bad_row,
            limit=row_limit(config),
        )

    def validation_metrics(self) -> Metrics:
        """Return the mean loss over all validation tokens that are in the loss."""
        total = num_tokens = 0.0
        for batch in self.in_order(self.validation, "val"):
            output = self.groups[self.recipe.role].compute_log_prob(batch)
            log_probs = read_columns(output, "log_probs")["log_probs"]
            total -= float(log_probs.double().sum())
            num_tokens += num_tokens_in_loss(batch)
        return {"val/loss": total / num_tokens}
