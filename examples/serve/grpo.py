# /// script
# requires-python = ">=3.11"
# dependencies = ["tinker>=0.38,<0.39", "numpy", "transformers>=5"]
# ///
"""GRPO as a client of `verl-like serve`: sample groups, score them, take a step.

  verl-like serve MODEL
  uv run examples/serve/grpo.py --model MODEL

The reward is the fraction of the characters in a response that are `a`.
"""

from __future__ import annotations

import argparse

import numpy as np
import tinker
from tinker import types


def main() -> None:
    """Print the mean reward of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="the MODEL of verl-like serve")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="tml-any")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    service = tinker.ServiceClient(base_url=options.url, api_key=options.key)
    trainer = service.create_lora_training_client(base_model=options.model, rank=16).result()
    tokenizer = trainer.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in ("say a", "say aa", "say aaa", "say aaaa")]
    params = types.SamplingParams(max_tokens=16, temperature=1.0)
    for step in range(options.steps):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt), 8, params) for prompt in prompts
        ]
        datums, rewards = [], []
        for prompt, future in zip(prompts, futures, strict=True):
            group = future.result().sequences
            scores = [score(tokenizer.decode(sample.tokens)) for sample in group]
            rewards += scores
            advantages = (np.array(scores) - np.mean(scores)) / (np.std(scores) + 1e-6)
            for sample, advantage in zip(group, advantages, strict=True):
                datums.append(datum_of(prompt, sample, float(advantage)))
        backward = trainer.forward_backward(datums, "importance_sampling")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=options.lr))
        loss, norm = backward.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]
        print(f"step {step}: reward {np.mean(rewards):.3f}, loss {loss:.3f}, norm {norm:.3g}")
    print("saved:", trainer.save_state("last").result().path)
    service.close("success").result()


def score(text: str) -> float:
    """Return the fraction of the text that is the letter `a`."""
    return text.count("a") / max(len(text), 1)


def datum_of(prompt: list[int], sample: types.SampledSequence, advantage: float) -> types.Datum:
    """Return a row for the loss; the prompt's tokens have advantage 0."""
    tokens, count = [*prompt, *sample.tokens], len(prompt) - 1
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * count + list(sample.logprobs or []),
        "advantages": [0.0] * count + [advantage] * len(sample.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


if __name__ == "__main__":
    main()
