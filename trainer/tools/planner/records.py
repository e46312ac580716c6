"""Record calls of a role's model with few layers and rows, and extrapolate to all of them.

    passes = record_passes(role_model, prompt=256, response=768, gpu=H100, num_ranks=8)
    passes.at("update", num_layers=28, num_rows=16).device

The calls are those of the role's `TrainEngine`, and of the native engine, on the meta device. What
they do is a line over the number of layers and the number of rows. Left out are recomputed layers,
quantized weights, offloading, parallel axes other than FSDP, and prefixes that rows share.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from trainer.tools.planner.recorder import META, GpuSpeeds, OperationRecorder, on_meta, patched
from trainer.tools.small_models import with_first_layers
from verl_like.batch.protocol import DataProto, Shard
from workers.config import ModelConfig, OptimConfig
from workers.losses.aggregate import LossAndMetrics
from workers.models.folder import model_folder, read_hf_config
from workers.models.memory_shapes import described_by, meta_model
from workers.models.precision import name_of, precision_of
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.sample import Sample
from workers.rollout.sampling import sample_tokens
from workers.training.engine import TrainEngine
from workers.training.loss import Loss
from workers.training.microbatch import Columns, MicroBatchBudget, MiniBatch
from workers.training.passes.lm_head import TokenOutputs
from workers.training.passes.packing import RowPasses
from workers.training.role_model_spec import RoleModelSpec
from workers.training.row_scores import ScoreTrainEngine

TOKENS = 4096
"""Tokens of the smaller recorded pass; the larger one has twice as many."""
DECODED_ROWS = 32
"""Rows of the smaller recorded step of decoding; the larger one has twice as many."""


STAND_INS = {
    "workers.training.build_model.choose_layout": lambda *_, **__: RowPasses("packed"),
    "workers.training.model_parts.compile.run_short_pass": lambda _: None,
}
"""No passes that test the model; padding, which some models need, is not counted."""

SAMPLED_ROWS = 256


class CallWork(NamedTuple):
    """What a call does on one GPU."""

    device: float = 0.0
    """Seconds of the device."""
    host: float = 0.0
    """Seconds in which the host starts operations."""
    gathered: float = 0.0
    """Bytes of whole tensors that FSDP gathers."""
    reduced: float = 0.0
    """Bytes of whole gradients that FSDP reduces."""

    @classmethod
    def of(cls, recorder: OperationRecorder, gpu: GpuSpeeds, compiled: bool) -> CallWork:
        """Return what was recorded."""
        sent = recorder.sent
        seconds = recorder.device_and_host(gpu, compiled)
        return cls(*seconds, sent["_allgather_base_"], sent["_reduce_scatter_base_"])


@dataclass
class Records:
    """The recorded works of a model's calls."""

    works: dict[str, dict[int, dict[int, CallWork]]] = field(default_factory=dict)
    """Call -> number of layers -> number of rows -> work."""

    def note(self, call: str, num_layers: int, num_rows: int, work: CallWork) -> None:
        """Add a recorded call."""
        self.works.setdefault(call, {}).setdefault(num_layers, {})[num_rows] = work

    def at(self, call: str, num_layers: float, num_rows: float = 0) -> CallWork:
        """Return the work of a call with this many layers and rows."""
        works = self.works[call]
        return _line({layers: _line(works[layers], num_rows) for layers in works}, num_layers)


def _line(points: dict[int, CallWork], x: float) -> CallWork:
    """Return the value at x of the line through the first and the last point."""
    (first, *_), (*_, last) = points, points
    share = (x - first) / (last - first) if last > first else 0.0
    pairs = zip(points[first], points[last], strict=True)
    return CallWork(*(max(0.0, a + (b - a) * share) for a, b in pairs))


_records: dict[str, Records] = {}


def record_passes(
    spec: RoleModelSpec, prompt: int, response: int, gpu: GpuSpeeds, num_ranks: int
) -> Records:
    """Record `forward` and, if the model is trained, `update` and `step`, on one of the ranks."""
    key = repr((spec, described_by(spec.model), prompt, response, gpu, num_ranks))
    if key not in _records:
        records = Records()
        for num_layers, model in _short_models(spec.model):
            short = replace(
                spec,
                model=model,
                fsdp=type(spec.fsdp)(),
                parallel=None,
                quantization=None,
                replays_routing=False,
                router_aux_loss_coef=0.0,
            )
            with on_meta(num_ranks), patched(STAND_INS):
                _record_calls(records, short, num_layers, (prompt, response), gpu, num_ranks)
        _records[key] = records
    return _records[key]


def products_only(
    weights: float, active: float, length: float, num_layers: int, gpu: GpuSpeeds, num_ranks: int
) -> Records:
    """Return works of a class that does not run on the meta device, from its numbers of weights."""
    records = Records()
    for layers, num_rows in product((0, num_layers), (0, 1)):
        share = layers / num_layers
        seconds = share * num_rows * 2 * active * length / gpu.products
        gathered = share * 2 * weights
        records.note("forward", layers, num_rows, CallWork(seconds, 0, gathered))
        records.note(
            "update", layers, num_rows, CallWork(3 * seconds, 0, 2 * gathered, 2 * gathered)
        )
        step = share * 28 * weights / num_ranks / gpu.memory
        records.note("step", layers, num_rows, CallWork(step))
    return records


def _short_models(model: ModelConfig) -> Iterator[tuple[int, ModelConfig]]:
    """Yield the model with few layers and with twice as many, and the number of layers."""
    config = read_hf_config(model_folder(model.path, weights=False))
    for times in (1, 2):
        few = with_first_layers(config, times)
        with tempfile.TemporaryDirectory() as folder:
            few.save_pretrained(folder)
            yield (
                few.get_text_config().num_hidden_layers,
                replace(
                    model,
                    path=folder,
                    random_init_seed=0,
                    compute_dtype=name_of(precision_of(model, "cuda").compute),
                    compile="off" if model.compile == "off" else "on",
                    enable_gradient_checkpointing=False,
                    share_prefixes=False,
                ),
            )


def _record_calls(
    records: Records,
    spec: RoleModelSpec,
    num_layers: int,
    lengths: tuple[int, int],
    gpu: GpuSpeeds,
    num_ranks: int,
) -> None:
    """Record the kernels of a role's calls on meta tensors, for two numbers of rows."""
    engine_class = ScoreTrainEngine if spec.head == "score" else TrainEngine
    optim = OptimConfig() if spec.trains else None
    engine = spec.engine(engine_class, optim_config=optim)
    worker: Any = SimpleNamespace(
        open_process_group=lambda: None, device=META, world_size=num_ranks
    )
    token_outputs, loss = TokenOutputs(entropy=spec.head == "token"), Loss("sum", _sum)
    with OperationRecorder():  # a short pass through compiled layers asks for numbers
        engine.build(worker, 1)
    fewest = max(2, TOKENS // sum(lengths))
    for num_rows in (1, fewest, 2 * fewest):  # the first calls prepare what later ones reuse
        rows = _rows(num_rows, *lengths, num_ranks)
        budget = MicroBatchBudget(tokens=num_rows * sum(lengths))
        calls: dict[str, Callable[[], Any]] = {
            "forward": functools.partial(engine.forward_rows, rows, budget, token_outputs)
        }
        if spec.trains:
            calls["update"] = functools.partial(engine.forward_backward_rows, rows, budget, loss)
            calls["step"] = engine.optim_step
        for call, run in calls.items():
            with OperationRecorder() as recorder:
                run()
            if num_rows > 1:
                work = CallWork.of(recorder, gpu, spec.model.compile == "on")
                records.note(call, num_layers, num_rows, work)


def _sum(outputs: Columns, columns: Columns, batch: MiniBatch) -> LossAndMetrics:
    total = torch.stack([column.sum() for column in outputs.values()]).sum()
    return total, {"loss": total}


def _rows(num_rows: int, prompt: int, response: int, num_ranks: int) -> DataProto:
    """Return a rank's rows, without padding."""
    ids = torch.arange(prompt + response) + torch.arange(num_rows)[:, None]
    ones = torch.ones_like(ids)
    columns = {
        "input_ids": ids % 7,
        "attention_mask": ones,
        "position_ids": ones.cumsum(dim=1) - 1,
        "responses": ids[:, prompt:] % 7,
        "response_mask": ones[:, prompt:],
    }
    rows = DataProto.from_dict(columns)
    if num_ranks > 1:
        rows.shard = Shard(0, num_ranks, 0, num_rows, num_rows * num_ranks)
    return rows


# ---------------------------------------------------------------------------------------------
# Generation
# ---------------------------------------------------------------------------------------------


def record_tokens(model: ModelConfig, context: int, gpu: GpuSpeeds, **sampling: Any) -> Records:
    """Record a `token` of the native engine for rows of `context` tokens."""
    key = repr((model, described_by(model), context, gpu, sampling))
    if key not in _records:
        records = Records()
        for num_layers, short in _short_models(model):
            module = meta_model(short, "token").to(precision_of(short, "cuda").compute)
            for num_rows in (DECODED_ROWS, 2 * DECODED_ROWS):
                recorder = decoded_token(module, num_rows, context, **sampling)
                records.note(
                    "token", num_layers, num_rows, CallWork.of(recorder, gpu, compiled=False)
                )
        _records[key] = records
    return _records[key]


def decoded_token(module: Any, num_rows: int, context: int, **sampling: Any) -> OperationRecorder:
    """Return what the native engine does for one more token of every row."""
    from workers.rollout.native.engine import NativeRolloutEngine

    recorders: list[OperationRecorder] = []
    checks = {
        "workers.rollout.native.engine.check_decoding": lambda *_: None,
        "workers.rollout.native.engine.agrees": lambda _: True,
    }
    limits = EngineLimits(context, 8, max_num_seqs=num_rows, kv_cache_gib=1e6)
    with patched(checks):
        for num_tokens in (3, 4):
            recorders.append(OperationRecorder())
            engine = NativeRolloutEngine(module, limits, owns_weights=False)
            engine.commit(0)
            samples = [Sample([6] * context, key) for key in range(num_rows)]
            settings = SamplingParams(max_tokens=num_tokens, stop_token_ids=(), **sampling)
            with recorders[-1]:
                engine.generate(samples, settings)
    before, recorder = recorders
    del recorder.operations[: len(before.operations)]
    recorder.waits -= before.waits
    recorder.copies -= before.copies
    recorder.num_started -= before.num_started
    return recorder


def sample(num_rows: int, num_words: int, **settings: Any) -> None:
    """Sample a token for every row."""
    logits = torch.empty(num_rows, num_words, device=META)
    noise = torch.empty(num_rows, dtype=torch.float64, device=META)
    sample_tokens(logits, noise, SamplingParams(max_tokens=1, stop_token_ids=(), **settings))


@functools.cache
def sampler_seconds(num_words: int, gpu: GpuSpeeds, **settings: Any) -> float:
    """Return the seconds of the device in which a row's token is sampled."""
    recorder = OperationRecorder()
    with recorder:
        sample(SAMPLED_ROWS, num_words, **settings)
    return recorder.device_and_host(gpu, compiled=False)[0] / SAMPLED_ROWS
