"""`trainer.logger=[mlflow]`: a run of MLflow, with the configuration.

MLflow itself is told where its server is, by MLFLOW_TRACKING_URI; without it, it keeps the numbers
where it does by default.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.flat import flat_config
from trainer.config.schema import RunConfig
from trainer.run_folder.checkpoint import MLFLOW_ID
from verl_like.errors import ConfigError
from verl_like.files import write_whole

LONGEST_VALUE = 500
"""Characters of a parameter's value that every version of MLflow takes."""
MOST_PARAMETERS, MOST_METRICS = 100, 1000
"""That MLflow takes in one request."""


class MLflow:
    """Metrics by step; a resumed run goes on in the run that the run folder names."""

    def __init__(self, config: RunConfig) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        folder = Path(config.trainer.default_local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        # `Checkpoints.cut_back` has taken it away where the run begins anew
        name = folder / MLFLOW_ID
        try:
            self._client = MlflowClient()
            if name.is_file():
                self._id = name.read_text(encoding="utf-8")
                self._client.update_run(self._id, "RUNNING")
            else:
                self._id = self._new_run(config)
        except MlflowException as error:
            raise ConfigError(
                f"trainer.logger names mlflow, which does not answer: {error}. Set "
                "MLFLOW_TRACKING_URI to its server or to a folder, or take mlflow out."
            ) from error
        write_whole(name, self._id)

    def _new_run(self, config: RunConfig) -> str:
        """The id of a run in the experiment of the project's name."""
        from mlflow.entities import Param

        trainer = config.trainer
        experiment = self._client.get_experiment_by_name(trainer.project_name)
        if experiment is None:
            where = self._client.create_experiment(trainer.project_name)
        else:
            where = experiment.experiment_id
        run_id: str = self._client.create_run(where, run_name=trainer.experiment_name).info.run_id

        values = flat_config(config).items()
        params = [Param(_allowed(key), str(value)[:LONGEST_VALUE]) for key, value in values]
        for start in range(0, len(params), MOST_PARAMETERS):
            self._client.log_batch(run_id, params=params[start : start + MOST_PARAMETERS])
        return run_id

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entries = [Metric(_allowed(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(entries), MOST_METRICS):
            self._client.log_batch(self._id, metrics=entries[start : start + MOST_METRICS])

    def close(self) -> None:
        """End the run, as failed where an error ends ours."""
        failure: Any = sys.exception()
        stopped = isinstance(failure, KeyboardInterrupt)
        status = "FINISHED" if failure is None else "KILLED" if stopped else "FAILED"
        self._client.set_terminated(self._id, status)


def _allowed(name: str) -> str:
    """The name in MLflow's letters: `mean@4` is mean_at_4 there."""
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"), flags=re.ASCII)
