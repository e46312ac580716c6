"""Take a step with non-finite gradients, and distill the likeliest tokens; print the numbers.

Runs in an environment with the SDK: `sdk_edges.py URL MODEL`.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import tinker
from tinker import types

IDS, K = [7, 9, 11, 13, 8, 6, 21], 3
url, model = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key="tml-x")
training = service.create_lora_training_client(model, rank=4, seed=1).result()
inputs = types.ModelInput.from_ints(IDS[:-1])
zeros, huge = [0.0] * len(IDS[1:]), [3e38] * len(IDS[1:])
policy = {"target_tokens": IDS[1:], "logprobs": zeros, "advantages": huge}
datum = types.Datum(model_input=inputs, loss_fn_inputs=policy)
training.forward_backward([datum], "importance_sampling").result()
skipped = training.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics

teacher = training.save_weights_and_get_sampling_client().result()
top = (
    teacher.sample(
        types.ModelInput.from_ints(IDS),
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=K,
    )
    .result()
    .topk_prompt_logprobs
)
pairs = np.array(top[1:])
soft = {
    "target_tokens": types.TensorData.from_numpy(pairs[:, :, 0].astype(np.int64)),
    "weights": types.TensorData.from_numpy(np.exp(pairs[:, :, 1]).astype(np.float32)),
}
datum = types.Datum(model_input=inputs, loss_fn_inputs=soft)
distilled = training.forward_backward([datum], "cross_entropy").result()
numbers = {
    "skipped": {name: str(value) for name, value in skipped.items()},
    "first": top[0],
    "expected": -float((np.exp(pairs[:, :, 1]) * pairs[:, :, 1]).sum()),
    "loss": distilled.metrics["loss:sum"],
}
print(json.dumps(numbers))
