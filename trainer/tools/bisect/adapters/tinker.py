"""Record the loop of a Tinker client from the data that it sends to `forward_backward`.

`data` is a list of `tinker.Datum`, as tinker_cookbook's `assemble_training_data` returns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_like.record import ragged

MASKS = ("mask", "weights", "logprobs")
"""Inputs of a loss that are zero at the tokens which were not sampled."""


def datum_arrays(data: Sequence[Any], **fields: Any) -> dict[str, Any]:
    """Return the arrays of a step from Tinker's data; `fields` have a number per datum.

    Example:

        recorder = Recorder("records/tinker", "tinker", {"learning_rate": 1e-4})
        recorder.step(1, datum_arrays(data, scores=rewards, group=group), lr=1e-4)
    """
    rows: dict[str, list[Any]] = {name: [] for name in ("prompts", "responses", *MASKS)}
    rows["advantages"] = []
    for datum in data:
        inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
        tokens = [*datum.model_input.to_ints()[:1], *inputs["target_tokens"]]
        mask = next(inputs[name] for name in MASKS if name in inputs)
        begin = next((n for n, inside in enumerate(mask) if inside), len(mask))
        rows["prompts"].append(tokens[: begin + 1])
        rows["responses"].append(tokens[begin + 1 :])
        rows["mask"].append([x != 0 for x in mask[begin:]])
        for name in ("logprobs", "advantages"):
            rows[name].append(inputs[name][begin:] if name in inputs else None)
    known = {name: None if None in values else values for name, values in rows.items()}
    return ragged(
        rows["prompts"],
        rows["responses"],
        response_mask=rows["mask"],
        rollout_log_probs=known["logprobs"],
        advantages=known["advantages"],
        **fields,
    )
