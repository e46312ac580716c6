"""Train and sample with an image, by the unmodified SDK: URL MODEL FILE TOKENS BEFORE AFTER."""

# mypy: ignore-errors

import json
import os
import sys
from pathlib import Path

import tinker
from tinker import types

url, base, file, tokens, *texts = sys.argv[1:]
os.environ |= {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-any"}
before, after = map(json.loads, texts)
image = types.ImageChunk(data=Path(file).read_bytes(), format="png", expected_tokens=int(tokens))
chunks = [
    types.EncodedTextChunk(tokens=before),
    image,
    types.EncodedTextChunk(tokens=after),
]
prompt = types.ModelInput(chunks=chunks)
service = tinker.ServiceClient()
model = service.create_lora_training_client(base_model=base, rank=4).result()
targets = [0] * (prompt.length - 1) + [7]
weights = [0.0] * (prompt.length - 1) + [1.0]
inputs = {"target_tokens": targets, "weights": weights}
datum = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
losses = []
for _ in range(5):
    result = model.forward_backward([datum], "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    losses.append(result.metrics["loss:sum"])
assert losses[-1] < losses[0] - 0.5, losses
sampler = model.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=1, temperature=0.0)
sampled = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
log_probs = sampler.compute_logprobs(prompt).result()
assert len(log_probs) == prompt.length
print("trained and sampled", losses, sampled.sequences[0].tokens)
