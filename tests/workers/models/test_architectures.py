"""The tiny configurations build reproducibly, with state off its defaults."""

from __future__ import annotations

import pytest
import torch

from tests.workers.models.architectures import (
    VOCAB,
    WINDOW,
    NotBuilt,
    build_tiny,
    cases,
    tiny_model_config,
)


def test_most_model_types_have_a_tiny_configuration() -> None:
    built = []
    for case in cases():
        try:
            tiny_model_config(case)
        except NotBuilt:
            continue
        built.append(case)
    assert len(built) >= 170


@pytest.mark.parametrize("case", ["llama", "deepseek_v3", "gemma2", "gpt_neox", "mamba2"])
def test_a_module_is_the_same_each_time_and_computes(case: str) -> None:
    one, other = (build_tiny(tiny_model_config(case)) for _ in range(2))
    ids = torch.arange(40)[None] * 7 % VOCAB
    with torch.no_grad():
        logits = one(input_ids=ids).logits
        assert torch.equal(logits, other(input_ids=ids).logits)
    assert logits.isfinite().all()
    assert logits.shape == (1, 40, VOCAB)


def test_windows_and_router_biases_are_off_their_defaults() -> None:
    assert tiny_model_config("gemma2").sliding_window == WINDOW
    assert tiny_model_config("llama4_text").attention_chunk_size == WINDOW
    state = build_tiny(tiny_model_config("deepseek_v3")).state_dict()
    biases = [value for name, value in state.items() if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(bias.abs().max() > 0.01 for bias in biases)
