"""A head that shares the embedding's memory gets new weights, though vLLM has packed it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.rollout_engines import (
    full_logits,
    load,
    make_engine,
    make_model,
    make_prompts,
    requests_of,
    settings,
)


@pytest.mark.vllm
def test_a_tied_head_computes_with_the_new_weights(
    tmp_path: Path,
) -> None:
    from transformers import LlamaForCausalLM

    config = make_model(tmp_path).config
    config.tie_word_embeddings = True
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    engine = make_engine("vllm", model, tmp_path)
    for version in range(2):
        with torch.no_grad():
            model.model.embed_tokens.weight.normal_()
        load(engine, model, version)
        prompts = make_prompts()[:2]
        outputs = engine.generate(requests_of(prompts), settings(do_sample=False))
        for prompt, output in zip(prompts, outputs, strict=True):
            steps = full_logits(model, prompt, output.tokens).log_softmax(-1)
            theirs = steps.gather(1, output.tokens[:, None])[:, 0]
            torch.testing.assert_close(output.log_probs, theirs, atol=1e-3, rtol=0)
