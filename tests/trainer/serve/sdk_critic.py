"""Train a critic by the `tinker` SDK; print the errors of its values before and after as JSON.

Runs in an environment with the SDK: `sdk_critic.py URL`.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import tinker
from tinker import types

IDS, GOAL, STEPS = [7, 9, 11, 13, 8, 6, 21], 1.0, 8


def main(url: str) -> None:
    """Train towards equal returns."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-x")
    critic = service.create_lora_training_client(base_model="critic", rank=0).result()
    prompt, count = types.ModelInput.from_ints(IDS[:-1]), len(IDS) - 1

    def datum(**columns: list[float]) -> types.Datum:
        inputs = {name: np.asarray(column, "float32") for name, column in columns.items()}
        return types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": IDS[1:], **inputs})

    def values(critic: tinker.TrainingClient) -> list[float]:
        output = critic.forward([datum()], "verl_like:value").result()
        return list(output.loss_fn_outputs[0]["values"].data)

    errors = []
    for _ in range(STEPS):
        old = values(critic)
        errors.append(sum((value - GOAL) ** 2 for value in old) / count)
        data = [datum(values=old, returns=[GOAL] * count, weights=[1.0] * count)]
        critic.forward_backward(data, "verl_like:value", {"cliprange_value": 0.5}).result()
        critic.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path, trained = critic.save_state("critic").result().path, values(critic)
    service.close("success")
    service = tinker.ServiceClient(base_url=url, api_key="tml-x")
    loaded = service.create_training_client_from_state_with_optimizer(path).result()
    print(json.dumps({"errors": errors, "is_equal": values(loaded) == trained}))


if __name__ == "__main__":
    main(*sys.argv[1:])
