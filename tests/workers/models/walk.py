"""One architecture through training, native decoding and export, against transformers.

    print(walk("gpt_neox", folder))     # {"training": "right (packed)", "native": "right", ...}

Each result begins with "right", "rejected" (by a `ConfigError`, whose text follows) or "wrong". The
reference is transformers' own pass over each single row, without padding.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor

from tests.workers.models.architectures import VOCAB, build_tiny, tiny_model_config
from tests.workers.samples import started, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.models.causal_lm import set_training_mode
from workers.roles.actor import ActorWorker
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.hf import HFRolloutEngine
from workers.rollout.native.engine import NativeRolloutEngine
from workers.rollout.sample import Sample
from workers.training.checkpoints.save_load import export_huggingface
from workers.training.engine import INPUTS
from workers.training.loss import Loss
from workers.training.microbatch import MicroBatchBudget, Rows, mini_batch
from workers.training.passes.lm_head import TokenOutputs

PROMPT, RESPONSE = 60, 100
ROWS = ((60, 100), (17, 40), (3, 5), (33, 90))
"""Tokens of the prompt and of the response of each row."""
Reference = tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]
"""Transformers' log-probs and entropies of every row, and the gradient."""
PARTS = ("training", "checkpointing", "native", "export")
"""Parts of an entry in `docs/data/models.json`."""
DECODED = 20
"""Tokens that an engine draws after each prompt: all rows pass every window."""
LARGEST_ERROR = 3e-5
"""Bound of decoding and export, in float32."""
LARGEST_TRAINING_ERROR = 1e-5
"""Bound of log-probs, entropies and gradients, in float32 or, where it rounds more, in float64."""
CRASHES = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def walk(case: str, folder: Path) -> dict[str, str]:
    """Return the result of each part; raise `NotBuilt` if transformers builds no such model."""
    module = build_tiny(tiny_model_config(case))
    module.save_pretrained(folder / "model")
    logging.disable(logging.WARNING)
    try:
        reference = functools.cache(partial(compute_reference, module, make_rows()))
        engine = functools.cache(partial(engine_of, folder))
        results = {"training": _result(lambda: _training(module, engine(False), reference()))}
        if results["training"].startswith("right"):
            results["checkpointing"] = _result(lambda: _training(module, engine(True), reference()))
            results["export"] = _result(lambda: _export(module, folder, engine(False)))
        results["native"] = _result(lambda: _native(module))
        if results["native"].startswith("rejected") and "export" in results:
            results["hf"] = _result(lambda: _hf(module))
    finally:
        logging.disable(logging.NOTSET)
    return results


def outcome(results: dict[str, str]) -> tuple[str, ...]:
    """Return the entry of `docs/data/models.json`, part by part."""
    return tuple(_cell(part, results.get(part, "")) for part in PARTS)


def _cell(part: str, result: str) -> str:
    kind, _, rest = result.partition(" ")
    kind = kind.rstrip(":")
    if kind == "right":
        return rest.strip("()") if part == "training" else "yes"
    if kind == "rejected":
        return "hf" if part == "native" else "rejected"
    return "**not right yet**" if kind else "–"


def _result(part: Callable[[], tuple[float, str]]) -> str:
    try:
        error, layout = part()
    except ConfigError as rejection:
        return f"rejected: {rejection}"
    except CRASHES as crash:
        return f"wrong: {type(crash).__name__}: {(str(crash).splitlines() or [''])[0]}"
    if error <= LARGEST_ERROR:
        return f"right{layout}"
    return f"wrong: off by {error:.0e}{layout}"


def make_rows() -> DataProto:
    """Return ragged rows with a weight for every response token."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(ROWS)
    positions = torch.arange(PROMPT + RESPONSE)
    mask = (positions >= PROMPT - lengths[:, :1]) & (positions < PROMPT + lengths[:, 1:])
    ids = torch.randint(6, VOCAB, mask.shape, generator=generator) * mask
    weights = torch.randn(len(ROWS), RESPONSE, generator=generator)
    columns = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:].clone(),
        "response_mask": mask[:, PROMPT:].long(),
        "advantages": weights,
    }
    return DataProto(batch=TensorDict(columns, batch_size=[len(ROWS)]))


def engine_of(folder: Path, checkpointing: bool = False) -> Any:
    """Return the engine of an actor that trains the model in the folder."""
    config = tiny_config(folder)
    config.data.max_prompt_length, config.data.max_response_length = PROMPT, RESPONSE
    config.actor_rollout_ref.model.enable_gradient_checkpointing = checkpointing
    return started(ActorWorker, config, 1).engine


def _training(module: Any, engine: Any, reference: Reference) -> tuple[float, str]:
    """Return the worst relative error of log-probs, entropies and the gradient, and the layout."""
    error = _training_error(engine, make_rows(), reference)
    if error > LARGEST_TRAINING_ERROR:
        error = error_in_float64(module, engine)
    if error > LARGEST_TRAINING_ERROR:
        raise AssertionError(f"off by {error:.0e} in float64")
    return error, f" ({engine.row_passes.kind})"


def _training_error(engine: Any, data: DataProto, reference: Reference) -> float:
    pairs, plain = reference
    outputs = engine.forward_rows(data, MicroBatchBudget(rows=4), TokenOutputs(entropy=True))
    inside = data.batch["response_mask"] != 0
    return max(
        _error(outputs["log_probs"][inside], torch.cat([lp for lp, _ in pairs])),
        _error(outputs["entropys"][inside], torch.cat([entropy for _, entropy in pairs])),
        _gradient_error(_gradient(engine, data), plain),
    )


def error_in_float64(module: Any, engine: Any) -> float:
    """Return the error of the same passes in float64.

    Norms of outputs that nearly cancel, as in gated linear attention, amplify float32's rounding.
    """
    exact = copy.deepcopy(module).double()
    engine.module.zero_grad(set_to_none=True)
    engine.module.double()
    experts = engine.module.config._experts_implementation
    for model in (exact, engine.module):
        if experts is not None:  # the grouped product has no float64
            model.set_experts_implementation("eager")
    data = make_rows()
    data.batch["advantages"] = data.batch["advantages"].double()
    error = _training_error(engine, make_rows(), compute_reference(exact, data))
    engine.module.float()
    if experts is not None:
        engine.module.set_experts_implementation(experts)
    return error


def compute_reference(module: Any, data: DataProto) -> Reference:
    """Return transformers' log-probs and entropies of every row, and the gradient."""
    module.zero_grad()
    pairs = [_reference_of_row(module, data, row) for row in range(len(ROWS))]
    weights = data.batch["advantages"]
    weighted = [(lp * weights[row, : len(lp)]).sum() for row, (lp, _) in enumerate(pairs)]
    torch.stack(weighted).sum().backward()
    return pairs, {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def _gradient(engine: Any, data: DataProto) -> dict[str, Tensor]:
    def loss(outputs: Any, columns: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        weighted = (outputs["log_probs"] * columns["advantages"]).sum()
        return weighted, {"loss": weighted}

    batch = mini_batch(Rows.from_batch(data, (*INPUTS, "advantages"), 1), 0, 1, None)
    set_training_mode(engine.module)
    with engine.running(engine.optimizer):
        engine.forward_backward(batch, MicroBatchBudget(rows=2), Loss("weighted", loss))
    engine.module.eval()
    named = engine.module.named_parameters()
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def _reference_of_row(module: Any, data: DataProto, row: int) -> tuple[Tensor, Tensor]:
    """Return the log-probs and entropies of a row's response, by transformers."""
    ids = data.batch["input_ids"][row][data.batch["attention_mask"][row] != 0]
    prompt, _ = ROWS[row]
    logits = module(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1]
    every = logits.log_softmax(-1)
    return every.gather(1, ids[prompt:, None])[:, 0], -(every.exp() * every).sum(-1).detach()


def _error(actual: Tensor, expected: Tensor) -> float:
    error = float((actual - expected).detach().norm() / expected.detach().norm())
    return error if error == error else torch.inf


def _gradient_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the error of the whole gradient; a missing gradient counts as zeros."""
    squares, nothing = 0.0, torch.zeros(())
    for name in expected.keys() | actual.keys():
        difference = actual.get(name, nothing) - expected.get(name, nothing)
        squares += float(difference.square().sum())
    size = sum(float(e.square().sum()) for e in expected.values())
    error = (squares / size) ** 0.5
    return error if error == error else torch.inf


def _export(module: Any, folder: Path, engine: Any) -> tuple[float, str]:
    export_huggingface(engine, folder / "export", writes=True)
    names = [set(load_file(folder / of / "model.safetensors")) for of in ("model", "export")]
    if names[0] != names[1]:
        raise AssertionError(f"other names than save_pretrained's: {names[0] ^ names[1]}")
    again = type(module).from_pretrained(
        folder / "export",
        dtype=torch.float32,
        attn_implementation=module.config._attn_implementation,  # sdpa drops soft-capping
    )
    ids = 6 + torch.arange(48)[None] * 7 % 120  # whole chunks of 16, as xlstm needs them
    with torch.no_grad():
        return _error(again(input_ids=ids).logits, module(input_ids=ids).logits), ""


def _native(module: Any) -> tuple[float, str]:
    engine = NativeRolloutEngine(module, EngineLimits(32, 64), owns_weights=False)
    return decoding_error(engine, module, num_prompts=4), ""


def _hf(module: Any) -> tuple[float, str]:
    """Run the hf engine on one row."""
    engine = HFRolloutEngine(module, EngineLimits(32, 64))
    return decoding_error(engine, module, num_prompts=1), ""


def decoding_error(engine: Any, module: Any, num_prompts: int) -> float:
    """Return how far greedy tokens are from the likeliest ones, and their log-probs are off."""
    engine.commit(0)
    rows = range(num_prompts)
    prompts = [[6 + (7 + row) * place % 120 for place in range(1 + 9 * row)] for row in rows]
    requests = [Sample(prompt, row) for row, prompt in enumerate(prompts)]
    sampling = SamplingParams(max_tokens=DECODED, stop_token_ids=(), do_sample=False)
    worst = 0.0
    for prompt, output in zip(prompts, engine.generate(requests, sampling), strict=True):
        with torch.no_grad():
            logits = module(torch.tensor([[*prompt, *output.tokens]]), use_cache=False).logits[0]
        steps = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        drawn = steps.gather(1, output.tokens[:, None])[:, 0]
        worst = max(worst, _error(output.log_probs, drawn), _error(drawn, steps.amax(-1)))
    return worst
