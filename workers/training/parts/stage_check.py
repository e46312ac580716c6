"""Check from its class, before a device is taken, if a model can be split into pipeline stages.

A class may scale embeddings in its forward pass, add positions to them, or have layers that read
the states of others. So a small model of the class is split after every layer, in one process, and
must compute the same as the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError
from workers.models.support.proof import Proof, Support, relative_error
from workers.parallel.pipeline import num_chunks
from workers.parallel.stages import NoStages, StageParts, Stages, stage_ranges
from workers.training.packing import model_inputs, padded_feed, read
from workers.training.row_proof import LARGEST_ERROR, probe_rows


@Proof
def stages_of_a_layer(model: Any) -> str:
    """Return what is wrong with the model when each layer is a separate stage."""
    try:
        num_layers = len(StageParts.of(model).layers)
    except NoStages as error:
        return str(error)
    columns, reads = probe_rows()
    feed = padded_feed(columns, reads, torch.device("cpu"))
    expected = read(model, feed)
    inputs = model_inputs(model, feed)
    if num_layers == 1:
        return ""
    stages = Stages(model, [range(number, number + 1) for number in range(num_layers)])
    received: list[Tensor] = []
    for stage in range(stages.last):
        with stages.computing(stage, received):
            received = [model(**inputs)]
        if received[0].shape[:2] != feed.inputs["input_ids"].shape:
            return f"its layers hand on states of {list(received[0].shape)}"
    with stages.computing(stages.last, received):
        output = read(model, feed)
    off = relative_error(output, expected)
    message = f"a small model of its class, cut after every layer, is off by {off:.0e}"
    return message if off > LARGEST_ERROR else ""


def check_stages(
    module: Any, support: Support, pp: int, schedule: str, ep: int, section: str
) -> list[range]:
    """Return the layers of every stage; reject a model that cannot be split into so many.

    The model may be on the meta device. `section` is the key of its `parallel` section.
    """
    setting, model_type = f"{section}.pp={pp}", support.model_type
    num_stages = pp * num_chunks(schedule)
    try:
        parts = StageParts.of(module)
        if num_stages > len(parts.layers):
            raise ConfigError(
                f"{setting} with {section}.pp_schedule={schedule} makes {num_stages} stages of the "
                f"{len(parts.layers)} layers of {model_type}; at most "
                f"{section}.pp={len(parts.layers) // num_chunks(schedule)}."
            )
        reason = support.why_not(stages_of_a_layer)
        if reason:
            raise NoStages(reason)
        ranges = stage_ranges(module, num_stages, ep)
    except NoStages as error:
        raise ConfigError(
            f"{setting}: model type {model_type} cannot be cut into stages: {error}. Set "
            f"{section}.pp=1; {section}.shard divides weights."
        ) from error
    trained = {id(weight) for weight in module.parameters() if weight.requires_grad}
    stages = Stages(module, ranges)
    idle = [number for number in range(num_stages) if trained.isdisjoint(stages.weights([number]))]
    if trained and idle:
        raise ConfigError(
            f"{setting}: nothing in stage {idle[0]} is trained (model.target_modules); set "
            f"{section}.pp=1, or take all-linear."
        )
    return ranges
