"""Write `workers/models/support.json`: `python tools/prove_models.py [CASE ...]` (half an hour).

Each way to run a model is tested on a small model of its class with random weights, in every
configuration of `tests/workers/models/architectures.py` and of `variants`. The reference is
transformers' own pass over each row. Windows, chunks and original lengths are 16 tokens, and the
rows are longer, so that an error beyond a limit is found. With arguments, the rows of these cases
are printed, and not written. `tests/workers/models/test_support.py` compares some with the table.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.workers.models.architectures import NotBuilt, cases, tiny_model_config
from tests.workers.models.test_image_input import Case, make_case
from tests.workers.models.vision import PROVED, write_model
from trainer.tools.small_models import MAX_CONTEXT, MAX_PARAMETERS, POSITIONS, VOCABULARY, shrunk
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import ConfigError
from workers.images import ImageRef, open_image
from workers.models.causal_lm import MODEL_ERRORS, quantizable
from workers.models.classes import generative_classes, model_class
from workers.models.folder import factor_border, read_hf_config
from workers.models.images import ImageInput
from workers.models.quantize import Int8Weight, make_room
from workers.models.routing import Routers
from workers.models.support import (
    LIMITS,
    ORIGINAL,
    TABLE,
    Support,
    features,
    ropes,
    window_sizes,
)
from workers.parallel.pipeline import NoStages, StageParts, Stages
from workers.parallel.sequence import AttendRows
from workers.rollout.native.kv_cache import (
    SlotCache,
    Slots,
    min_window,
    prefill_width,
    slot_width,
)
from workers.rollout.native.module_forward import ModuleForward, grouped_decoding
from workers.training.microbatch import MicroBatchBudget, RowColumns
from workers.training.passes.attention import packed_rows, takes_layout
from workers.training.passes.lm_head import TokenOutputs, columns_of_logits, in_chunks
from workers.training.passes.packing import RowPasses, model_inputs, read

LARGEST_ERROR = 3e-4
"""Largest relative error between two correct passes over a row; wrong ones are off by 2e-3 or more.

Rounding in float32 causes 1e-6, and 1e-4 where decays multiply up (minimax, gemma3n).
"""
LARGEST_IN_CHUNKS = 1e-5
"""The same for results and gradients of a head in chunks."""
ROUNDING = 1e-6
"""Norm of a gradient, relative to the largest one, up to which it may be only rounding."""
LARGEST_CACHED = 2e-5
"""The same for logits with and without the cache of transformers."""
LARGEST_REPLAYED = 1e-4
"""The same for a pass with the choices of each token in another order."""
LARGEST_INT8 = 0.25
"""The same for logits with int8 weights. Most classes have errors of 0.02 to 0.07, mixtures with
random routers 0.2, and classes with a decaying state 0.3 to 0.6.
"""
LENGTHS = (100, 57, 50, 33, 12, 9)
"""Lengths of the test rows; their sum exceeds the number of positions of a small model."""
SLICES = (slice(0, 12), slice(12, 140), slice(140, None))
"""Slices of the packed test row: one below every limit, one that crosses rows, and the rest."""
NATIVE_PROMPTS = ((30, 3, 17, 24), (3,))
"""Lengths of the prompts of the native engine, in two groups that are decoded separately."""
PROMPT_WIDTH, NUM_STEPS = 32, 24
"""Prompt width and decode steps of the native engine, so that its cache grows once."""
ENDLESS = 10**6
"""A window, chunk or original length that no row exceeds."""
SCALES = {
    **{"embedding_multiplier": 12.0, "logits_scaling": 8.0, "lm_head_multiplier": 0.1},
    **{"residual_multiplier": 0.2, "attention_multiplier": 0.02, "key_multiplier": 0.4},
    **{"attention_in_multiplier": 0.5, "attention_out_multiplier": 0.9},
    **{"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.2, "final_logit_softcapping": 2.0},
    **{"routed_scaling_factor": 2.5, "moe_routed_scaling_factor": 2.5, "route_scale": 2.5},
}
"""Field that a small configuration leaves at 1 or None -> a value as in published models."""
PROMPTS = (24, 3, 1)
"""Lengths of the prompts of transformers' `generate`, decoded one after the other.

The prompt of one token finds classes that store their state in their modules. They take this token
for the next token of the previous row.
"""


class NoModel(Exception):
    """Raised if there is no small model of a class, or if transformers' own pass over it fails."""


def small_model(config: Any, attention: str) -> Any:
    """Build a tiny float32 model of the class on the CPU, in evaluation mode."""
    from huggingface_hub.errors import StrictDataclassError

    cls, failures = model_class(config), []
    for with_widths in (True, False):
        try:
            small = shrunk(config, with_widths, longest=ENDLESS)
            text = small.get_text_config()
            for name, value in SCALES.items():
                if getattr(text, name, value) in (1, None):
                    setattr(text, name, value)
            with torch.device("meta"):
                size = cls._from_config(small).num_parameters()
            if size > MAX_PARAMETERS:
                raise ValueError(f"it would have {size:,} parameters, more than {MAX_PARAMETERS:,}")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = cls._from_config(small, dtype=torch.float32, attn_implementation=attention)
                _leave_defaults(model)
                model.eval()(torch.arange(3, 8)[None], use_cache=False)
            return model
        except (*MODEL_ERRORS, StrictDataclassError) as error:
            failures.append(f"{type(error).__name__}: {error}")
    raise NoModel("; ".join(failures).splitlines()[0])


@torch.no_grad()
def _leave_defaults(model: Any) -> None:
    """Add noise, so that weights are as large as a trained model's and norms are not 1."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            # so that some step sizes of a state space model reach their lower limit
            parameter.sub_(3.0)
        spread = 0.1 if parameter.ndim < 2 else 1 / math.sqrt(parameter.shape[-1])
        parameter.add_(torch.randn_like(parameter) * spread)
    persistent = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.is_floating_point():
            noise = 0.1 * torch.randn_like(buffer)
            # keep the zeros in a table of decays: they are its mask
            buffer.add_(noise if buffer.ndim < 2 else noise * buffer)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of `expected`; inf for a NaN."""
    error = float((actual - expected).float().norm() / expected.float().norm())
    return error if error == error else torch.inf


def rows_packed(model: Any) -> str:
    """Return what is wrong with packed rows on this model."""
    return _find_fault(RowPasses("packed"), model)


def prefixes_shared(model: Any) -> str:
    """Return what is wrong with packed rows that share prefixes on this model."""
    return _find_fault(RowPasses("packed", shares=True), model)


def rows_padded(model: Any) -> str:
    """Return what is wrong with padded rows on this model."""
    return _find_fault(RowPasses("padded"), model)


@torch.no_grad()
def _find_fault(row_passes: RowPasses, model: Any) -> str:
    """Return what is wrong with rows in this layout; "" if nothing is."""
    columns, reads = probe_rows()
    expected = []
    try:
        # transformers' logits of each row separately
        for tokens, inside in zip(columns["input_ids"].rows(), reads.rows(), strict=True):
            expected.append(model(tokens[None], use_cache=False).logits[0, inside])
        if not all(row.isfinite().all() for row in expected):
            raise ValueError("its logits are not finite")
    except MODEL_ERRORS as error:
        raise NoModel(f"transformers' own pass: {error}") from error

    row_passes = replace(row_passes, border=factor_border(model.config))
    cpu, budget = torch.device("cpu"), MicroBatchBudget(rows=len(LENGTHS))
    with packed_rows(model) if row_passes.kind == "packed" else nullcontext():
        for rows in row_passes.cut(reads, budget):
            index = torch.tensor(rows)
            picked = {name: column.index_select(0, index) for name, column in columns.items()}
            try:
                feed = row_passes.feed(picked, reads.index_select(0, index), cpu)
                logits = read(model, feed)
            except MODEL_ERRORS as error:
                return f"it rejects such rows: {type(error).__name__}: {error}"
            sizes = [len(expected[row]) for row in rows]
            for row, actual in zip(rows, logits.split(sizes), strict=True):
                off_by = relative_error(actual, expected[row])
                if off_by > LARGEST_ERROR:
                    return (
                        f"a row of {LENGTHS[row]} tokens in a small model of its class is off by "
                        f"{off_by:.0e}"
                    )
    return ""


SLICES = (slice(0, 12), slice(12, 140), slice(140, None))
"""Slices of the packed test row: one below every limit, one that crosses rows, and the rest."""


class _RecordedRank:
    """Simulates ranks: records the inputs and outputs of attention, then returns slices of them."""

    def __init__(self) -> None:
        self.noted: list[list[Tensor]] = []
        self.part: slice | None = None
        self.error = 0.0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, attend: AttendRows
    ) -> Tensor:
        states = [query, key, value]
        if self.part is None:
            self.noted.append([*states, attend(*states, sinks, None)])
            return self.noted[-1][3]
        *full_states, output = self.noted[self.num_calls]
        self.num_calls += 1
        for actual, expected in zip(states, full_states, strict=True):
            self.error = max(self.error, relative_error(actual, expected[self.part]))
        return output[self.part]

    def look_at(self, part: slice) -> None:
        self.part, self.num_calls = part, 0


def find_split_fault(model: Any) -> str:
    """Return what goes wrong if a packed row is computed in slices, with recorded attention."""
    columns, reads = probe_rows()
    every = reads.with_values(reads.values | True)
    feed = RowPasses("packed").feed(columns, every, torch.device("cpu"))
    ranks = _RecordedRank()
    feed.inputs["row_layout"].ranks = ranks
    with packed_rows(model):
        inputs = model_inputs(model, feed)
        expected = model(**inputs).logits[0]
        if not ranks.noted:
            return "it uses a custom attention function"
        for part in SLICES:
            ranks.look_at(part)
            inputs_here = {name: inputs[name][:, part] for name in ("input_ids", "position_ids")}
            logits = model(**{**inputs, **inputs_here}).logits[0]
            error = max(ranks.error, relative_error(logits, expected[part]))
            if error > LARGEST_ERROR:
                return f"a part of a row in a small model of its class is off by {error:.0e}"
    return ""


def probe_rows() -> tuple[RowColumns, RaggedTensor]:
    """Return test rows, and the positions that are read; their last tokens are not read.

    All rows begin with the same tokens.
    """
    rows = [torch.arange(length) for length in LENGTHS]
    positions = RaggedTensor.from_rows(rows, POSITIONS)
    numbers = torch.arange(len(positions.values))
    numbers = torch.where(positions.values < LENGTHS[3] // 3, positions.values, numbers)
    tokens = 3 + numbers * 7 % (VOCABULARY - 3)
    columns = {"input_ids": positions.with_values(tokens), "position_ids": positions}
    reads = [(row >= len(row) // 3) & (row < len(row) - 2) for row in rows]
    return columns, RaggedTensor.from_rows(reads, POSITIONS)


def stages_of_a_layer(model: Any) -> str:
    """Return what goes wrong when each layer is a separate stage; "" if nothing does."""
    try:
        num_layers = len(StageParts.of(model).layers)
    except NoStages as error:
        return str(error)
    columns, reads = probe_rows()
    feed = RowPasses().feed(columns, reads, torch.device("cpu"))
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
    message = f"a small model of its class, split after every layer, is off by {off:.0e}"
    return message if off > LARGEST_ERROR else ""


def head_in_chunks(model: Any) -> str:
    """Return what is wrong with the chunked head on this model."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ValueError("its head computes every position")
    positions = RaggedTensor.from_rows([torch.arange(12)] * 2, 12)
    tokens = 3 + torch.arange(24) * 7 % (VOCABULARY - 3)
    columns = {"input_ids": positions.with_values(tokens), "position_ids": positions}
    reads = positions.with_values(positions.values > 2)
    feed = RowPasses().feed(columns, reads, torch.device("cpu"))
    labels = tokens.view(2, 12).roll(-1, dims=1)[feed.reads]
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    compute = functools.partial(columns_of_logits, token_outputs=TokenOutputs(0.7, entropy=True))
    numbers: list[list[Tensor]] = []
    with torch.enable_grad():
        for at_once in (True, False):
            if at_once:
                columns_here = compute(read(model, feed), labels)
            else:
                columns_here = in_chunks(model, feed, labels, compute, 5)
            loss = (columns_here["log_probs"] * labels.float().sin()).sum() + columns_here[
                "entropys"
            ].cos().sum()
            grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            numbers.append([*(column.detach() for column in columns_here.values()), *grads])

    # such a gradient is 0 except for rounding, as that of the biases of keys
    negligible = ROUNDING * max(float(gradient.norm()) for gradient in grads)
    errors = [0.0]
    for expected, actual in zip(*numbers, strict=True):
        if max(expected.norm(), actual.norm()) > negligible:
            errors.append(float((actual - expected).norm() / expected.norm()))
    error = max(errors)
    if error <= LARGEST_IN_CHUNKS:
        return ""
    return f"in a small model of its class, results are off by {error:.0e}"


def slot_cache_decoding(model: Any) -> str:
    """Return what is wrong with decoding this model from a slot cache; "" if nothing is."""
    decoded = [row for lengths in NATIVE_PROMPTS for row in _decoded(model, lengths)]
    worst = 0.0
    for row, logits in decoded:
        plain = model(torch.tensor([row]), use_cache=False).logits[0, -len(logits) :].float()
        worst = max(worst, relative_error(logits, plain))
    if worst <= LARGEST_ERROR:
        return ""

    return f"logits are off by {worst:.0e}"


def _decoded(model: Any, lengths: tuple[int, ...]) -> list[tuple[list[int], Tensor]]:
    """Return each prompt with its greedy response, and the logits of every step."""
    prompts = [
        tuple(6 + (7 + row) * place % (VOCABULARY - 6) for place in range(length))
        for row, length in enumerate(lengths)
    ]
    config, positions = model.config.get_text_config(), torch.tensor(lengths)
    width = slot_width(config, PROMPT_WIDTH, NUM_STEPS)
    slots = Slots(len(prompts), width, min_window(config), positions.device)
    cache = SlotCache(config.num_hidden_layers, slots)

    with grouped_decoding(model):
        forward = ModuleForward(model, cache)
        cache.fit(1 + PROMPT_WIDTH, 0)
        width = prefill_width(max(lengths), PROMPT_WIDTH)
        logits = [forward.prefill(prompts, width, torch.arange(len(prompts)), 0)]
        for step in range(NUM_STEPS - 1):
            cache.fit(max(lengths) + step + 2, len(prompts))
            logits.append(forward.decode(logits[-1].argmax(dim=1), positions + step))

    steps = torch.stack(logits, dim=1).float()
    tokens = steps.argmax(dim=2).tolist()
    return [
        ([*prompt, *new[:-1]], row) for prompt, new, row in zip(prompts, tokens, steps, strict=True)
    ]


def generation_with_cache(model: Any) -> str:
    """Return what is wrong with cached decoding on this model; "" if nothing is."""
    # all rows with a cache first, as in a run: a pass without cache would clear left-over state
    cached = [_greedy_logits(model, length, use_cache=True) for length in PROMPTS]
    plain = []  # from one pass over each prompt and its greedy tokens
    for length, steps in zip(PROMPTS, cached, strict=True):
        row = torch.cat([_prompt_of(length), steps.argmax(dim=1)[None, :-1]], dim=1)
        plain.append(model(row, use_cache=False).logits[0, length - 1 :].float())
    if max(map(relative_error, cached, plain)) <= LARGEST_CACHED:
        return ""

    plain = [_greedy_logits(model, length, use_cache=False) for length in PROMPTS]
    worst = max(map(relative_error, cached, plain))
    if worst <= LARGEST_CACHED:
        return ""
    return f"with it, the logits of a small model of its class are off by {worst:.0e}"


def generation_without_cache(model: Any) -> str:
    """Return "" if the model decodes without a cache; it raises an error otherwise."""
    _greedy_logits(model, PROMPTS[0], use_cache=False)
    return ""


def _prompt_of(length: int) -> Tensor:
    return 3 + torch.arange(length)[None] * 7 % (VOCABULARY - 3)


def _greedy_logits(model: Any, length: int, use_cache: bool) -> Tensor:
    """Return logits [steps, vocabulary] of a greedy response to a prompt of `length` tokens."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()
    prompt = _prompt_of(length)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_STEPS,
        do_sample=False,
        pad_token_id=0,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(output.logits).float()


@torch.no_grad()
def rows_with_images(family: str, folder: Path, attention: str, support: Support) -> str:
    """Return what is wrong with rows with images on the model of a family; "" if nothing is.

    The reference is transformers' own decoding after each prompt, with the arguments that its
    processor returns: a policy samples so, and cannot look at later tokens. Every layout that a run
    may choose must have the same logits.
    """
    case = make_case(family, folder, attention=attention, dtype=torch.float32)
    expected: list[Tensor] = []
    for row, (text, refs) in enumerate(zip(case.prompts, case.refs, strict=True)):
        logits, case.rows[row] = _decoded_by_transformers(case, text, refs)
        case.starts[row] = len(case.rows[row]) - len(logits)
        expected.append(logits)

    layouts = {("padded", False): support.why_not("padded")}
    if not ImageInput(case.module, case.reader).looks_ahead:
        layouts["packed", False] = support.why_not("packed")
        if takes_layout(case.module) and not layouts["packed", False]:
            layouts["packed", True] = support.why_not("shared")
    for kind, shares in (layout for layout, reason in layouts.items() if not reason):
        with packed_rows(case.module) if kind == "packed" else nullcontext():
            together = case.passes(kind, list(range(len(case.rows))), shares)
        for of_row, actual in zip(expected, together.split(NUM_STEPS), strict=True):
            off_by = relative_error(actual, of_row)
            if off_by > LARGEST_ERROR:
                return f"in {kind} rows, logits of a small model are off by {off_by:.0e}"
    return "" if "" in layouts.values() else "rows of text are wrong"


def _decoded_by_transformers(
    case: Case, text: str, refs: Sequence[ImageRef]
) -> tuple[Tensor, list[int]]:
    """Return the logits of a greedy response, and the tokens up to its last but one."""
    from transformers import GenerationConfig

    processor = case.reader.processor
    if refs:
        images = [[open_image(ref) for ref in refs]]
        settings = {"add_special_tokens": False, "return_tensors": "pt"}
        inputs = dict(processor(images=images, text=[text], **settings))
        inputs.pop("labels", None)
    else:
        inputs = {"input_ids": torch.tensor([processor.tokenizer(text)["input_ids"]])}
    for name, tensor in inputs.items():
        inputs[name] = tensor.to(case.module.dtype if tensor.is_floating_point() else None)
    case.module.generation_config = GenerationConfig()
    output = case.module.generate(
        **inputs,
        max_new_tokens=NUM_STEPS,
        do_sample=False,
        pad_token_id=0,
        suppress_tokens=[*case.reader.stop_ids],
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(output.logits).float(), output.sequences[0, :-1].tolist()


def replayed_routing(model: Any) -> str:
    """Return what is wrong when original, reordered or different choices are replayed, or ""."""
    routers = Routers(model)
    ids = torch.arange(3, 35)[None]

    def logits_of(chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        with routers.recording() as noted, routers.replaying():
            routers.replay(chosen)
            logits = model(ids, use_cache=False).logits
        return logits, noted.pop_choices()

    logits, chosen = logits_of(None)
    if not torch.equal(logits_of(chosen)[0], logits):
        return "a replay of its own choices gives different outputs"

    flipped = chosen.flip(-1)
    replayed, received = logits_of(flipped)
    if not torch.equal(received, flipped):
        return "its experts do not receive the top-k choices over all experts"
    if relative_error(replayed, logits) > LARGEST_REPLAYED:
        return "the weights of its experts do not follow its choices"

    others = (chosen + 1) % routers.num_experts
    replayed, received = logits_of(others)
    if not torch.equal(received, others) or torch.equal(replayed, logits):
        return "its experts do not receive the top-k choices over all experts"
    return ""


def int8_rounding(model: Any) -> str:
    """Return what is wrong with int8 rounding on this model; "" if nothing is."""
    ids = 3 + torch.arange(40)[None] * 7 % (VOCABULARY - 3)
    exact = model(ids, use_cache=False).logits.float()
    for _, layer in list(quantizable(model)):
        values = layer.weight
        make_room(layer, Int8Weight)
        layer.weight.copy_(values)
    error = relative_error(model(ids, use_cache=False).logits, exact)
    if error <= LARGEST_INT8:
        return ""
    return f"logits of a small model of its class are off by {error:.0%}"


PROOFS: dict[str, Callable[[Any], str]] = {
    "packed": rows_packed,
    "padded": rows_padded,
    "native": slot_cache_decoding,
    "cached": generation_with_cache,
    "shared": prefixes_shared,
    "split": find_split_fault,
    "stages": stages_of_a_layer,
    "generate": generation_without_cache,
    "replay": replayed_routing,
    "int8": int8_rounding,
    "head": head_in_chunks,
}
"""Way -> its proof, which returns what is wrong on a small model, or ""."""
BY_ATTENTION = ("packed", "padded", "native", "cached")
"""Ways that are tested with sdpa and eager attention; `head` is tested with eager attention."""
DECODING = ("native", "cached")
"""Ways that may be correct within limits only."""
MISSING = re.compile("ImportError|ModuleNotFoundError")
"""In the reason for which there is no small model: a package is missing here."""
Ways = dict[str, frozenset[str]]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 8.0],
    ORIGINAL: 16,
    "factor": 16.0,
}


def variants(case: str, config: Any) -> Iterator[Any]:
    """Yield the configuration, and others of its class that are published."""
    yield config
    text = config.get_text_config()
    fields: list[dict[str, Any]] = []
    if getattr(text, "is_decoder", None) is True:
        fields.append({"is_decoder": False})
    for flag in ("alibi", "use_bidirectional_attention"):
        if getattr(text, flag, None) is False:
            fields.append({flag: True})
    if text.model_type.startswith("lfm2"):
        fields.append({"layer_types": ["conv", "full_attention"] * 2})
    elif getattr(text, "layer_types", None):
        kinds = sorted(set(type(text)().layer_types))
        if not set(kinds) <= set(text.layer_types):
            fields.append({"layer_types": (kinds * 4)[: len(text.layer_types)]})
    if case == "granitemoehybrid":
        fields.append({"layer_types": ["attention"] * 4})
    if getattr(text, "use_sliding_window", None) is False and hasattr(text, "layer_types"):
        kinds = ["sliding_attention", "full_attention"] * 2
        fields.append({"use_sliding_window": True, "sliding_window": 16, "layer_types": kinds})
    elif getattr(text, "sliding_window", 0) is None and not hasattr(text, "layer_types"):
        fields.append({"sliding_window": 16})
    if case in ("phimoe", "phi4_multimodal", "minicpm3"):
        fields.append({"rope_parameters": LONGROPE, ORIGINAL: 16})
    for others in fields:
        variant = copy.deepcopy(config)
        for name, value in others.items():
            setattr(variant.get_text_config(), name, value)
        yield variant


def within(config: Any, passed: Sequence[str]) -> Any:
    """Return the config with these limits at `MAX_CONTEXT` tokens, the others beyond any row."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    for part in (text.__dict__, *ropes(text)):
        for name in LIMITS:
            if isinstance(part.get(name), int):
                part[name] = MAX_CONTEXT if name in passed else ENDLESS
    return changed


@torch.no_grad()
def is_correct(way: str, config: Any, attention: str) -> bool:
    """Run the proof of a way."""
    model = small_model(config, attention)
    try:
        return not PROOFS[way](model)
    except (*MODEL_ERRORS, ConfigError):
        return False


def ways_with(config: Any, attention: str, names: Sequence[str]) -> Ways:
    """Return which of the ways are correct with this attention, and within which limits."""
    limits = sorted({name for name, _ in window_sizes(config)})
    ways: Ways = {}
    for way in names:
        if is_correct(way, within(config, limits), attention):
            ways[way] = frozenset()
        elif way in DECODING and limits and is_correct(way, within(config, ()), attention):
            tight = [n for n in limits if not is_correct(way, within(config, [n]), attention)]
            ways[way] = frozenset(tight or limits)
    return ways


def rounds_published(config: Any, attention: str) -> bool:
    """Return whether int8 is accurate with the ratios of widths that the class has by default.

    If there is no small model of the default configuration, only states that decay count as wrong.
    """
    published = type(config)()
    published.architectures = config.architectures
    try:
        return is_correct("int8", published, attention)
    except NoModel:
        return not features(config) & {"linear_attention", "hybrid", "mamba"}


def ways_of(config: Any) -> Ways:
    """Return the correct ways to run a configuration; raise NoModel if they cannot be tested."""
    others = [name for name in PROOFS if name not in (*BY_ATTENTION, "head")]
    by_attention: dict[str, Ways] = {}
    ways: Ways = {}
    for attention in ("sdpa", "eager"):
        try:
            by_attention[attention] = ways_with(config, attention, BY_ATTENTION)
            if len(by_attention) == 1:
                ways |= ways_with(config, attention, others)
                if not rounds_published(config, attention):
                    ways.pop("int8", None)
        except NoModel as error:
            failure = error
    if not by_attention:
        raise failure
    if "eager" in by_attention:
        ways |= ways_with(config, "eager", ["head"])
    for way in BY_ATTENTION:
        results = {name: each.get(way) for name, each in by_attention.items()}
        of_both = results.get("sdpa")
        if of_both is not None and results.get("eager") == of_both:
            ways[way] = of_both
        else:
            ways |= {f"{way}@{n}": limits for n, limits in results.items() if limits is not None}
    return ways


def rows_of(case: str) -> dict[str, Ways]:
    """Return the rows of a case: class and features -> ways."""
    rows: dict[str, Ways] = {}
    try:
        configs = list(variants(case, tiny_model_config(case)))
    except NotBuilt:
        return {}
    for config in configs:
        for cls in generative_classes(config):
            config.architectures = [cls.__name__]
            key = " ".join([cls.__name__, *sorted(features(config))])
            try:
                ways = ways_of(config)
            except NoModel as error:
                print(f"{key}: no small model: {error}")
                if cls.__name__.endswith("ForCausalLM") or MISSING.search(str(error)):
                    continue  # it is not listed, and runs on padded rows
                ways = {}
            rows[key] = common(rows.get(key, ways), ways)
    for key, is_correct in classes_with_images(case, rows).items():
        rows[key] = rows[key] | ({"images": frozenset()} if is_correct else {})
    return rows


def classes_with_images(case: str, rows: dict[str, Ways]) -> dict[str, bool]:
    """Return class and features -> whether rows with images are correct, in all families of a case.

    Without the packages of a family's processor, the table's own entry counts.
    """
    results: dict[str, bool] = {}
    for family in (name for name in PROVED if name.partition("+")[0] == case):
        with tempfile.TemporaryDirectory() as name:
            try:
                config = read_hf_config(write_model(family, Path(name)))
            except (ImportError, RuntimeError) as error:
                print(f"{family}: its processor has no package here: {error}".splitlines()[0])
                table = json.loads(TABLE.read_text(encoding="utf-8"))
                return {key: "images" in table.get(key, "").split() for key in rows}
            key = " ".join([model_class(config).__name__, *sorted(features(config))])
            if key not in rows:
                rows[key] = ways_of(config)
            reasons = []
            for attention in ("sdpa", "eager"):
                support = Support(config.model_type, config, attention, rows[key])
                reasons.append(rows_with_images(family, Path(name), attention, support))
        print(f"{family}: images of {key}: {' '.join(filter(None, reasons)) or 'correct'}")
        results[key] = results.get(key, True) and not any(reasons)
    return results


def common(some: Ways, others: Ways) -> Ways:
    """Return what is correct in two configurations with equal features."""
    return {way: some[way] | others[way] for way in some.keys() & others.keys()}


def words_of(ways: Ways) -> str:
    """Return the ways as words of the table."""
    words = (f"{way}<{','.join(sorted(ways[way]))}" if ways[way] else way for way in sorted(ways))
    return " ".join(words)


def main(*names: str) -> None:
    """Test all cases and write the table, or print the rows of some cases."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    table: dict[str, Ways] = {}
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        for case, rows in zip(names or cases(), pool.map(rows_of, names or cases()), strict=True):
            for key, ways in rows.items():
                table[key] = common(table.get(key, ways), ways)
                print(f"{case}: {key}: {words_of(ways)}", flush=True)
    if not names:
        lines = [f" {json.dumps(key)}: {json.dumps(words_of(table[key]))}" for key in sorted(table)]
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
