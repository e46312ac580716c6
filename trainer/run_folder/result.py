"""The result of a finished run: its metrics, its model, its samples, and its files."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from trainer.config.keys import config_hash
from trainer.config.schema import RunConfig
from trainer.run_folder.folder import MODEL, REPORT_FILE, marker_of_model, saved_steps
from trainer.run_folder.metrics import metric_names, read_metrics, series
from verl_like.errors import ConfigError, nearest
from verl_like.files import json_objects

logger = logging.getLogger(__name__)
EXPORT = "huggingface"
"""Folder of a role's checkpoint that `from_pretrained` loads."""
MAX_NUMBERS = 6
"""The number of metrics that a result prints."""


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run: its folder, metrics and trained model.

    Example:

        result = run(load_config(settings))
        result.metrics[-1]["critic/score/mean"], result.model_folder

    Args:
        folder: the run folder.
        config_hash: the hash in the first line of `config.yaml`; equal for equal configurations.
        metrics: the lines of `metrics.jsonl`: the metrics of each step, with its number as `step`.
        exported: the final model, the newest export, or None; see `model_folder`.
    """

    folder: Path
    config_hash: str
    metrics: list[dict[str, float]]
    exported: Path | None

    @classmethod
    def of(cls, config: RunConfig, role: str) -> RunResult:
        """Load the result of a finished run; `role` is the role that exports the model."""
        folder = Path(config.trainer.default_local_dir)
        notes: list[str] = []
        file = folder / "metrics.jsonl"
        metrics = read_metrics(file, notes) if file.is_file() else []  # a check writes none
        for note in notes:
            logger.warning("%s", note)
        exports = [folder / f"global_step_{step}" / role / EXPORT for step in saved_steps(folder)]
        left = [folder / MODEL] if marker_of_model(folder) else []
        places = [*left, *reversed(exports)]
        exported = next((path for path in places if path.is_dir()), None)
        return cls(folder, config_hash(config), metrics, exported)

    def __repr__(self) -> str:
        """Return at most ten lines: the first and last values of a few metrics, and the files."""
        last = self.metrics[-1]["step"] if self.metrics else 0
        lines = [f"{last:.0f} step{'s' * (last != 1)} in {self.folder}"]
        for name, values in self._watched()[:MAX_NUMBERS]:
            lines.append(f"  {name:<24} {values[0]:.4g} -> {values[-1]:.4g}")
        lines.append(f"  {'model':<24} {self.exported or 'not saved'}")
        return "\n".join([*lines, f"  {'report':<24} {self.report}"])

    def _watched(self) -> list[tuple[str, list[float]]]:
        """Return the first metric of each figure of the report, with its values."""
        from trainer.tools.report.figures import panels_of

        known = metric_names(self.metrics)
        watched: dict[str, list[float]] = {}
        for panel in panels_of(self.metrics):
            for name in panel.names_among(known):
                _, values = series(self.metrics, name)
                if values not in watched.values() and (any(values) or not panel.leaves_out_zero):
                    watched[name] = values
                    break
        return list(watched.items())

    @property
    def report(self) -> Path:
        """The HTML report of the run."""
        return self.folder / REPORT_FILE

    @cached_property
    def model(self) -> Any:
        """The trained model, loaded on first access."""
        import transformers

        from workers.models.classes import model_class
        from workers.models.folder import read_hf_config

        config = read_hf_config(self.model_folder)
        cls = getattr(transformers, config.architectures[0], None) or model_class(config)
        return cls.from_pretrained(self.model_folder, dtype="auto", trust_remote_code=False)

    @cached_property
    def tokenizer(self) -> Any:
        """The trained model's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_folder, trust_remote_code=False)

    @property
    def model_folder(self) -> Path:
        """The folder of the trained model, for `from_pretrained`."""
        if self.exported is None:
            raise ConfigError(
                f"{self.folder} has no model. Set trainer.save_final=true, which saves the model "
                "when a run ends, or add hf_model to checkpoint.save_contents of the trained role."
            )
        return self.exported

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """Return the samples of a step, by default the last one: `input`, `output`, `score`, ...

        The run may keep only the best and the worst sample of steps that are older than the newest
        `trainer.rollout_steps_to_keep`.
        """
        files = {int(file.stem): file for file in (self.folder / "rollouts").glob("*.jsonl")}
        if not files:
            raise ConfigError(f"the run in {self.folder} has no samples.")
        if step is not None and step not in files:
            raise ConfigError(
                f"{self.folder} has no samples of step {step}, only of steps {min(files)} to "
                f"{max(files)}."
            )
        return json_objects(files[max(files) if step is None else step])[0]

    def plot(self, *names: str) -> Curves:
        """Return the report's curves for a notebook, or those of metrics such as `val-core/*`."""
        from trainer.tools.report.figures import Panel, curves, panels_of

        panels = [Panel(name, "", (name,)) for name in names] or panels_of(self.metrics)
        drawn = {panel.title: curves(self.metrics, panel) for panel in panels}
        known = metric_names(self.metrics)
        for name in names:
            if not drawn[name]:
                raise ConfigError(f"no step has a metric {name!r}.{nearest(name, known)}")
        return Curves({title: svg for title, svg in drawn.items() if svg}, self.report)

    def to_pandas(self) -> Any:
        """Return the metrics as a `DataFrame` with a row per step, whose index is the step, too."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                f"to_pandas() needs pandas ({error}). Install it with: pip install pandas"
            ) from error
        table = pandas.DataFrame(self.metrics)
        return table.set_index("step", drop=False).rename_axis(None)


@dataclass(frozen=True, repr=False)
class Curves:
    """Figures for a notebook."""

    figures: dict[str, str]
    """Title -> SVG."""
    report: Path

    def __repr__(self) -> str:
        return f"curves of {', '.join(self.figures)}; outside a notebook see {self.report}"

    def _repr_html_(self) -> str:
        boxes = [
            f"<div><b>{escape(title)}</b><br>{svg}</div>" for title, svg in self.figures.items()
        ]
        style = "display:flex;flex-wrap:wrap;gap:12px;background:#fff;color:#222"
        return f'<div style="{style}">{"".join(boxes)}</div>'
