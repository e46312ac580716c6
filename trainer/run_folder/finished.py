"""A run that is started again after its last step: it is told so, and nothing is started.

The last checkpoint of a run is marked, and looked at before anything is read.
"""

from __future__ import annotations

from trainer.config.flat import NAMES_OF_A_RUN
from trainer.run_folder.checkpoint import Checkpoints
from trainer.run_folder.marker import read_marker
from verl_like.files import read_json_object

IS_LAST = "is_last_step"
"""In the driver's state of a checkpoint: no step of that run comes after it."""


def why_finished(checkpoints: Checkpoints) -> str:
    """That this very run has had its last step, in words; "" where it has not.

    A run with another setting, such as a length, is started: it may have steps left.
    """
    start = checkpoints.start
    if start is None or not checkpoints.goes_on_here:
        return ""
    saved = read_marker(start)["config"]
    keys = checkpoints.config.keys() - set(NAMES_OF_A_RUN)
    if any(saved.get(key) != checkpoints.config[key] for key in keys):
        return ""
    try:
        state = read_json_object(start / "trainer.json")
    except (OSError, ValueError):
        return ""  # the resume says what is wrong with it
    if not state.get(IS_LAST):
        return ""
    return (
        f"{checkpoints.folder} holds this run, which ended with step {checkpoints.start_step}: "
        "nothing is left to do. More steps come of trainer.total_training_steps, "
        "trainer.total_epochs or trainer.stop_at, another run of another "
        "trainer.default_local_dir."
    )
