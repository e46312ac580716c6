"""Weights that change within a paused generation."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

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


def test_tokens_after_a_sync_within_a_paused_generation_are_the_new_versions(
    tmp_path: Path,
) -> None:
    old, new = make_model(tmp_path / "old", 0), make_model(tmp_path / "new", 1)
    engine = make_engine("native", old, tmp_path, max_num_seqs=6)
    load(engine, old, 1)
    plain = settings(do_sample=False, stop_token_ids=(63,))
    reached, go_on = threading.Event(), threading.Event()
    checkpoint = engine.control.checkpoint
    steps: list[int] = []

    def watched() -> Any:
        steps.append(0)
        if len(steps) == 6:
            reached.set()
            assert go_on.wait(30)
        return checkpoint()

    engine.control.checkpoint = watched
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.extend(engine.generate(requests_of(make_prompts()), plain))
    )
    thread.start()
    assert reached.wait(30)
    threading.Timer(0.2, go_on.set).start()
    engine.control.pause()
    load(engine, new, 2)
    engine.control.resume()
    thread.join(60)
    mixed = 0
    for request, output in zip(requests_of(make_prompts()), results, strict=True):
        versions = output.versions.tolist()
        assert versions == sorted(versions)
        mixed += len(set(versions)) == 2
        for model, version in ((old, 1), (new, 2)):
            made = output.versions == version
            logits = full_logits(model, list(request.prompt), output.tokens)
            assert torch.equal(logits.argmax(-1)[made], output.tokens[made])
            expected = torch.log_softmax(logits, -1).gather(1, output.tokens[:, None])[:, 0]
            torch.testing.assert_close(output.log_probs[made], expected[made], atol=1e-4, rtol=0)
    assert mixed == 6
