"""The one training engine: a causal LM over its ranks that scores rows and takes optimizer steps.

Every role that has a model (actor, critic, reference, reward model) owns one `TrainEngine` and adds
what is its own: a loss.

    engine = TrainEngine(model_config, fsdp_config, head="token", optim_config=optim)
    engine.build(worker, total_steps)           # opens the process group, shards, loads
    columns = engine.forward_rows(data, Budget(tokens=16384))    # {"log_probs": [rows, R]}
    metrics, outputs = engine.forward_backward_rows(data, Budget(rows=8), loss)
    metrics |= engine.optim_step()

`workers.training.update` composes these two into an update: epochs over mini-batches.

Rows run without their padding where that is proven right (`workers.training.row_proof`). The
strategies and the mesh are in `workers.parallel.fsdp`. On one rank, and under strategy ddp without
tensor parallelism, the module is a plain one, so that a rollout engine in the same process can read
it by reference.

Engines for other rows extend it: one number a row (`score_engine`), pairs of rows (`pairs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from verl_like.batch.ragged import Column, Ragged, rectangle_of
from verl_like.errors import ConfigError
from workers.models.attention import head_size, say_once, warn_once
from workers.models.causal_lm import Head, body_of, empty_model, recomputes, to_training
from workers.models.load import load_weights
from workers.models.lora import adapter_parts, add_adapter, merged_tensors, split_tensors
from workers.models.memory_shapes import meta_model
from workers.models.precision import computing_in, frozen, precision_of
from workers.models.proof import relative_error
from workers.models.quantize import quantize_linears
from workers.models.routing import COLUMN as ROUTED
from workers.models.routing import Routers
from workers.models.stand_in import MODEL_ERRORS
from workers.models.state import named_state, persistent_buffers
from workers.parallel import tensor as tensor_parallel
from workers.parallel.experts import spread_experts
from workers.parallel.fsdp import (
    add_up_gradients,
    begin_pass,
    full_tensor,
    reshard,
    shard,
    tensor_on_first,
)
from workers.parallel.groups import Groups
from workers.parallel.offload import HostBlocks, resident
from workers.parallel.page_lock import to_device
from workers.parallel.pipeline import Action, Pipeline, exchanged_sum, num_chunks, stage_by_stage
from workers.parallel.placements import local_part
from workers.parallel.sharding import dims_of, settle
from workers.parallel.stages import Stages
from workers.training.attention import describe, packed_rows
from workers.training.compiled import CompiledLayers, why_not_over
from workers.training.float8 import check_float8, float8_layers, float8_linears
from workers.training.lm_head import DEFAULT, Wanted, token_columns
from workers.training.loss import Loss
from workers.training.microbatch import (
    Budget,
    MiniBatch,
    RowColumns,
    Rows,
    all_reduce,
    detached,
    mini_batch,
    passes,
    spread,
)
from workers.training.nonfinite_guard import NonfiniteGuard
from workers.training.on_cpu import cpu_kernels, prepare_cpu_process
from workers.training.on_gpu import prepare_gpu_process
from workers.training.optim import (
    CONFIGURED,
    Schedule,
    StepSettings,
    build_optimizer,
    guarded_step,
)
from workers.training.packing import Feed, check_rows, model_inputs, read, response_reads
from workers.training.row_proof import RowPasses, prove_rows, rounding, short_pass
from workers.training.stage_proof import check_stages
from workers.training.varlen import find_kernel
from workers.weights.checksum import checksum_of

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
    from verl_like.process.worker import Worker
    from workers.config import FrozenFSDPConfig, ModelConfig, OptimConfig, ParallelConfig

Made = Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]
TOKENS = ("input_ids", "attention_mask", "position_ids")
INPUTS = (*TOKENS, "responses", "response_mask")
"""Columns that every pass over responses reads."""


class TrainEngine:
    """One model of one role on this rank; without an optimizer config it is frozen."""

    forward_inputs: ClassVar[Sequence[str]] = INPUTS
    """Columns that a forward pass reads."""
    folder_settings: Mapping[str, Any] = MappingProxyType({})
    """What `config.json` of an exported folder says beside the model's own fields."""

    def __init__(
        self,
        model_config: ModelConfig,
        fsdp_config: FrozenFSDPConfig,
        *,
        strategy: str = "fsdp",
        head: Head = "token",
        optim_config: OptimConfig | None = None,
        grad_clip: float = 1.0,
        quantization: str | None = None,
        parallel: ParallelConfig | None = None,
        replays_routing: bool = False,
    ) -> None:
        """With `replays_routing`, rows that say which experts their tokens go to are heard."""
        self.model_config = model_config
        self.quantization = quantization
        self.sharding = settle(strategy, fsdp_config, parallel, quantization=quantization)
        self.optim_config = optim_config
        self.head: Head = head
        self.grad_clip = grad_clip
        self.optimizer: torch.optim.Optimizer | None = None
        self.has_gradients = False
        self.names_of_step: list[str] = []
        """What messages call the rows whose gradients the next optimizer step takes."""
        self.host_blocks = HostBlocks()
        self.compiled: CompiledLayers | None = None
        self.float8_layers: list[nn.Linear] = []
        self.row_passes = RowPasses()
        self.replays_routing = replays_routing
        self.routers: Routers | None = None

    def build(self, worker: Worker, total_steps: int = 0) -> None:
        """Shard and load the model on the worker's device.

        The learning rate's schedule spans `total_steps` update calls.
        """
        worker.open_process_group()
        self.device = worker.device
        if self.device.type == "cpu":
            prepare_cpu_process()
        else:
            prepare_gpu_process()

        self.dims = dims_of(worker.world_size, self.sharding)
        self.groups = Groups(self.dims, self.device)
        self.is_sharded = self.groups.loss is not None and self.sharding.strategy != "ddp"

        trained = self.optim_config is not None
        if not trained:
            self.model_config = frozen(self.model_config, self.device.type)
        precision = precision_of(self.model_config, self.device.type)
        in_float8 = self.model_config.fp8_linear and not self.quantization
        if in_float8:
            check_float8(self.device, precision.compute, self.dims)
        self.module: Any = empty_model(self.model_config, self.head, self.device)
        if not trained:
            self.module.requires_grad_(False)  # what its class freezes, training leaves frozen
            if self.quantization:
                quantize_linears(self.module, self.device)
        if trained and self.model_config.lora_rank > 0:
            add_adapter(self.module, self.model_config)
        self.cut: tensor_parallel.Cut | None = None
        ranges: list[range] = []
        if self.dims.pp > 1:
            attention = body_of(self.module).config.get_text_config()._attn_implementation
            how = self.dims.pp, self.sharding.pp_schedule, self.dims.ep
            ranges = check_stages(self.module, attention, *how, "parallel")
        if self.groups.tp is not None:
            tensor_parallel.check(self.module, self.dims.tp, "parallel.tp")
            self.cut = tensor_parallel.apply(self.module, self.groups.mesh["tp"])
        if self.dims.ep > 1:
            spread_experts(self.module, self.groups.ep_mesh)
        if self.replays_routing:
            self.routers = Routers(self.module)  # of all stages: rows say it of every layer
        layers = CompiledLayers(self.module, self.device)
        self.whole_module: Any = self.module
        """All layers, without memory where other ranks have some of them."""
        self.pipeline = Pipeline()
        if ranges:
            own = self.model_config if trained else replace(self.model_config, lora_rank=0)
            self.whole_module = meta_model(own, self.head)
            self.pipeline = self._make_stages(ranges, precision.compute)
        if self.is_sharded:
            mesh, strategy = self.groups.fsdp_mesh, self.sharding.strategy
            efsdp_mesh = self.groups.efsdp_mesh if self.dims.ep > 1 else None
            self.is_one_unit = shard(self.module, mesh, precision.cast, strategy, efsdp_mesh)
        self.cast = None if self.is_sharded else precision.cast  # FSDP casts what it gathers
        load_weights(self.module, self.model_config, self.head, self.device, self.whole_module)

        if self.optim_config is not None:
            self.optimizer = build_optimizer(self.parameters(), self.optim_config)
            self.guard = NonfiniteGuard(self.optim_config.max_skipped_steps, self.groups)
            self.scheduler = Schedule(self.optimizer, self.optim_config, total_steps)

        wanted = self.model_config.attn_implementation
        size = head_size(self.module.config)
        self.kernel, why_not = find_kernel(wanted, self.device, precision.compute, size)
        rows: dict[str, Any] = {
            "may_pack": self.model_config.use_remove_padding,
            "group": self.groups.sp,
            "cut_over": self.groups.model,
            "compute": self._compute_alone,
        }
        with self.running(), computing_in(self.module, self.cast):
            self.row_passes = prove_rows(self.module, self.device, self.kernel, **rows)
        say_once(describe(self.module, self.packs, self.kernel, why_not))
        if in_float8:
            self.float8_layers = float8_layers(self.module)
        wanted = self.model_config.compile
        if wanted == "on" or (wanted == "auto" and self.device.type == "cuda"):
            self._compile(layers)

    def _make_stages(self, ranges: Sequence[range], dtype: torch.dtype) -> Pipeline:
        """Leave this rank's layers in the module; collective over all ranks."""
        assert self.groups.pp is not None, "there are stages where ranks share layers"
        stages, kind = Stages(self.module, ranges), self.sharding.pp_schedule
        stages.keep(range(self.groups.pp.rank(), len(ranges), self.dims.pp))
        if self.cut is not None:
            here = {id(child) for child in self.module.modules()}
            self.cut.partial[:] = [pair for pair in self.cut.partial if id(pair[0]) in here]
        links = self.groups.links(2 * num_chunks(kind))
        return Pipeline(stages, self.groups.pp, kind, links, dtype, self.device)

    def _compile(self, layers: CompiledLayers) -> None:
        """Have passes go through compiled layers, if that is right; collective over all ranks."""
        reason = why_not_over(self.dims) or self._why_not_compiled(layers)
        failed = torch.tensor(float(bool(reason)), device=self.device)
        if all_reduce(failed, self.groups.world, torch.distributed.ReduceOp.MAX):
            self.compiled = None
            reason = reason or "they do not run so on another rank"
            if self.model_config.compile == "on":
                raise ConfigError(f"model.compile=on: {reason}; set model.compile=off.")
            warn_once(f"layers of {self.module.config.model_type} are not compiled: {reason}.")

    def _why_not_compiled(self, layers: CompiledLayers) -> str:
        if self.routers is not None:
            return "replayed routing changes layers from pass to pass"
        if reason := layers.why_not():
            return reason
        found = []
        for self.compiled in (None, layers):
            try:
                with self.running(), computing_in(self.module, self.cast):
                    found.append(short_pass(self.module, self.row_passes, self.device))
            except Exception as error:  # noqa: BLE001 - compilers raise types of their own
                return " ".join(str(error).split())[:200]
        off, limit = relative_error(found[1], found[0]), rounding(self.module, found[0].dtype)
        return "" if off <= limit else f"a pass is off by {off:.0e}, over {limit:.0e}"

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every weight, as a plain tensor."""
        return self.cut is None and not self.is_sharded and self.groups.pp is None

    @property
    def runs_again(self) -> bool:
        """Whether layers of a pass are run again after other passes, and choose experts as told."""
        can_recompute = getattr(self.module, "supports_gradient_checkpointing", True)
        again = recomputes(self.model_config, self.device.type, can_recompute)
        return again and self.routers is not None and self.dims.pp > 1

    @property
    def packs(self) -> bool:
        """Whether rows run end to end, without padding."""
        return self.row_passes.kind == "packed"

    def forward_rows(
        self,
        data: DataProto,
        budget: Budget,
        wanted: Wanted = DEFAULT,
        names: Sequence[str] = (),
    ) -> RowColumns:
        """For every row `log_probs` (and `entropys`, `sum_pi_squared`), or `values`.

        Each is [rows, R], zero outside the response mask, and ragged where that is. A pass reads
        the columns `names`, too.
        """
        rows = self.take(data, names, self.forward_inputs)
        cuts = self._cut(rows.columns, budget)
        pieces: dict[str, list[Column]] = {}
        self.module.eval()
        with torch.no_grad(), self.running(), computing_in(self.module, self.cast):
            found = [*passes(rows.columns, cuts, self.groups.data, self.device)]
            for action in self.pipeline.actions(len(found), trains=False):
                columns, real, _ = found[action.number]

                def compute(columns: RowColumns = columns, real: int = real) -> list[Tensor]:
                    for name, column in self.outputs(columns, wanted).items():
                        pieces.setdefault(name, []).append(column[:real])
                    return []

                self._forward(action, columns, compute)
        restored = {name: rows.restore(columns, cuts) for name, columns in pieces.items()}
        of_all_stages: RowColumns = self.pipeline.from_last(restored)
        return of_all_stages

    def forward_backward(
        self,
        batch: MiniBatch,
        budget: Budget,
        loss: Loss,
        pieces: dict[str, list[Column]] | None = None,
    ) -> dict[str, float]:
        """Add the gradients of a mini-batch's loss to those that are there.

        Returns the metrics, summed over micro-batches and over the ranks with unlike rows. The
        model's outputs are appended to `pieces`, one column per micro-batch.
        """
        assert self.optimizer is not None, "a frozen engine was asked for gradients"
        to_training(self.module)
        try:
            totals = self._run_passes(batch, budget, loss, pieces)
        except BaseException:
            # a part of a mini-batch must not reach a step
            self.optimizer.zero_grad(set_to_none=True)
            raise
        finally:
            self.module.eval()
        self.has_gradients = True
        self.names_of_step += batch.names
        metrics: dict[str, float] = {}
        if self.pipeline.has_last:
            summed = all_reduce(torch.stack(list(totals.values())), self.groups.data)
            metrics = dict(zip(totals, summed.tolist(), strict=True))
        metrics = self.pipeline.from_last(metrics)
        return metrics

    def forward_backward_rows(
        self,
        data: DataProto,
        budget: Budget,
        loss: Loss,
        denominators: Mapping[str, int] | None = None,
    ) -> tuple[dict[str, float], RowColumns]:
        """`forward_backward` of a whole batch; also returns the model's outputs for every row.

        `denominators` (`num_rows`, `num_tokens`) are the counts of a mini-batch of which the batch
        is a part. By default they are the batch's own.
        """
        rows = self.take(data, loss.columns)
        batch = mini_batch(rows, 0, 1, self.groups.data, self.device)
        batch = replace(batch, **(denominators or {}))
        pieces: dict[str, list[Column]] = {}
        with self.running(self.optimizer):
            metrics = self.forward_backward(batch, budget, loss, pieces)
        cuts = self._cut(batch.columns, budget)
        outputs = {name: rows.restore(columns, cuts) for name, columns in pieces.items()}
        of_all_stages: RowColumns = self.pipeline.from_last(outputs)
        return metrics, of_all_stages

    def optim_step(self, settings: StepSettings = CONFIGURED) -> dict[str, float]:
        """Clip the gradients, take an optimizer step with them, and clear them.

        A norm that is not finite clears them without a step. Gives `grad_norm`, `lr`, and whether
        the step was skipped.
        """
        assert self.optimizer is not None, "a frozen engine was asked for a step"
        if not self.has_gradients:
            raise ConfigError("optim_step: no gradients are there; call forward_backward before.")
        self.sum_gradients()
        grad_clip = self.grad_clip if settings.grad_clip is None else settings.grad_clip
        with settings.applied_to(self.optimizer):
            lr: float = self.optimizer.param_groups[0]["lr"]
            norm = guarded_step(
                self.optimizer, self.parameters(), grad_clip, self.groups, self._copied()
            )
        names, self.names_of_step = self.names_of_step, []
        self.has_gradients = False
        self.guard.note(norm, names)
        if settings.ends_update:
            self.scheduler.step()
        return {"grad_norm": norm, "lr": lr, "skipped_steps": float(not math.isfinite(norm))}

    def sum_gradients(self) -> None:
        """Add up the gradients that ranks have parts of; once before a step."""
        if not self.is_sharded:
            add_up_gradients(self.parameters(), self.groups.loss)
        if self.cut is not None:
            self.cut.add_up_gradients()
        self._add_up_tied()

    def _add_up_tied(self) -> None:
        """The gradient of a weight that the first stage has as embeddings, the last as head."""
        name = None if self.pipeline.stages is None else self.pipeline.stages.tied_to
        if name is None or not (weight := self.module.get_parameter(name)).requires_grad:
            return
        assert self.groups.pp is not None, "stages are along it"
        own = local_part(weight.grad)
        own.copy_(exchanged_sum(own, self.groups.pp))

    @property
    def copies(self) -> set[str]:
        """Names of the weights here that count on another rank: of embeddings that are the head."""
        stages = self.pipeline.stages
        if stages is None or stages.tied_to is None or not self.pipeline.has_last:
            return set()
        return {stages.tied_to}

    def _run_passes(
        self,
        batch: MiniBatch,
        budget: Budget,
        loss: Loss,
        pieces: dict[str, list[Column]] | None = None,
    ) -> dict[str, Tensor]:
        """Forward and backward passes over a mini-batch; returns this rank's shares of its metrics.

        The outputs of the passes over real rows are appended to `pieces`.
        """
        totals: dict[str, Tensor] = {}
        cuts = self._cut(batch.columns, budget)
        found = [*passes(batch.columns, cuts, self.groups.data, self.device)]
        num_left = len(found) * num_chunks(self.pipeline.kind)
        with computing_in(self.module, self.cast):
            for action in self.pipeline.actions(len(found)):
                if not action.is_forward:
                    num_left -= 1
                    if self.runs_again:
                        self.feed(found[action.number][0])
                    if self.is_sharded:
                        waits = len(self.pipeline.waiting) > 1
                        how = self.is_one_unit, num_left == 0, self.sharding.strategy, waits
                        begin_pass(self.module, *how)
                    self.pipeline.backward(action)
                    continue

                columns, num_real, _ = found[action.number]

                def compute(
                    columns: RowColumns = columns, num_real: int = num_real
                ) -> list[Tensor]:
                    outputs = self.outputs(columns, loss.wanted)
                    if pieces is not None:
                        for name, column in outputs.items():
                            pieces.setdefault(name, []).append(detached(column[:num_real]))
                    # losses are formulas of rectangles
                    said = {name: rectangle_of(column) for name, column in outputs.items()}
                    for_loss = columns.keys() - {ROUTED}
                    asked = {name: self._for_loss(columns[name]) for name in for_loss}
                    total, shares = loss.compute(said, asked, batch)
                    for name, share in shares.items():
                        if num_real:
                            share = share.detach().float()
                        else:  # a dummy adds nothing
                            share = torch.zeros((), device=self.device)
                        totals[name] = totals[name] + share if name in totals else share
                    return [total]

                of_stage = getattr(loss.compute, "of_stage", None)
                self._forward(action, columns, compute, of_stage)
        return totals

    def _forward(
        self,
        action: Action,
        columns: RowColumns,
        compute: Callable[[], list[Tensor]],
        of_stage: Callable[[RowColumns], list[Tensor]] | None = None,
    ) -> None:
        """A forward pass of a stage; the last one is computed by `compute`.

        Others give states, and what `of_stage` says that they add to the loss.
        """

        def shapes() -> list[tuple[int, ...]]:
            return [self._shape(self.feed(part)) for part in self.parts(columns)]

        def states() -> list[Tensor]:
            feeds = [self.feed(part) for part in self.parts(columns)]
            given = [self.module(**model_inputs(self.module, feed)) for feed in feeds]
            return given if of_stage is None else given + of_stage(columns)

        self.pipeline.forward(action, compute if self.pipeline.is_last(action) else states, shapes)

    def _shape(self, feed: Feed) -> tuple[int, ...]:
        """Of the states between layers."""
        width = self.module.config.get_text_config().hidden_size
        return (*feed.inputs["input_ids"].shape, width)

    def _compute_alone(self, feed: Feed, compute: Callable[[], Tensor]) -> Tensor | None:
        """One pass through all stages; what `compute` gives in the last one, None elsewhere."""
        found: list[Tensor] = []

        def last() -> list[Tensor]:
            found.append(compute())
            return []

        def states() -> list[Tensor]:
            try:
                return [self.module(**model_inputs(self.module, feed))]
            except MODEL_ERRORS:  # the next stage waits for something
                nan = torch.full(self._shape(feed), torch.nan, device=self.device)
                return [nan.to(self.pipeline.dtype)]

        with torch.no_grad():
            for action in self.pipeline.actions(1, trains=False):
                own = last if self.pipeline.is_last(action) else states
                self.pipeline.forward(action, own, lambda: [self._shape(feed)])
        return found[0] if found else None

    def parts(self, columns: RowColumns) -> list[RowColumns]:
        """The rows of a micro-batch by forward passes: all in one."""
        return [columns]

    def outputs(self, columns: RowColumns, wanted: Wanted = DEFAULT) -> RowColumns:
        """One forward pass: [rows, R] columns for the response positions.

        They are zero where the response mask is.
        """
        mask = columns["response_mask"]
        inside = mask.values != 0
        feed = self.feed(columns)
        if self.head == "token":
            found = token_columns(
                self.module,
                feed,
                to_device(feed.own(columns["responses"].values[inside]), self.device),
                wanted,
                may_chunk=self.model_config.use_fused_kernels,
                words=None if self.cut is None else self.cut.words,
            )
        else:
            found = {"values": read(self.module, feed)[:, 0].float()}
        found = feed.gathered(found)

        inside = to_device(inside, self.device)
        zeros = next(iter(found.values())).new_zeros(len(inside))
        return {
            name: mask.with_values(zeros.masked_scatter(inside, column))
            for name, column in found.items()
        }

    def _for_loss(self, column: Column) -> Tensor:
        values = to_device(rectangle_of(column), self.device)
        # what is infinite is NaN to every formula, also to one that clamps it: the step is skipped
        if values.is_floating_point():
            values = values.masked_fill(values.isinf(), torch.nan)
        return values

    def reads(self, columns: RowColumns) -> Ragged:
        """For every token, whether it gets a head."""
        return response_reads(columns)

    def feed(self, columns: RowColumns) -> Feed:
        """The arguments of one pass over these rows, whose experts are chosen as they say."""
        feed = self.row_passes.feed(columns, self.reads(columns), self.device)
        if self.routers is not None:
            self.routers.replay(feed.routed)
        return feed

    def take(
        self, data: DataProto, names: Sequence[str] = (), inputs: Sequence[str] = INPUTS
    ) -> Rows:
        """This rank's real rows of a batch: the columns `inputs` of a pass, and `names`."""
        rows = Rows.take(data, (*inputs, *names), self.dims.data_size)
        check_rows(self.module, rows.columns["input_ids"])
        if self.routers is not None and ROUTED in rows.columns:
            self.routers.check(rows.columns[ROUTED].values)
        return rows

    def _cut(self, columns: RowColumns, budget: Budget) -> list[list[int]]:
        """The rows of every pass."""
        reads = self.reads(columns)
        cuts, lengths = self.row_passes.cut(reads, budget), self.row_passes.lengths(reads)
        return self._for_stages(cuts, lengths, budget)

    def _for_stages(
        self, cuts: list[list[int]], lengths: Sequence[int], budget: Budget
    ) -> list[list[int]]:
        """By tokens, as many passes as there are ranks to work on them at the same time."""
        return cuts if budget.tokens is None else spread(cuts, lengths, self.dims.pp)

    @contextmanager
    def running(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Within, the module (and the optimizer's state) is ready to compute on the device.

        Packed rows attend row by row, and on a CPU linear layers go through oneDNN. What forward
        passes left whole of a sharded module is a shard again in the end.
        """
        with ExitStack() as stack:
            stack.enter_context(self._resident(optimizer))
            if self.is_sharded:
                stack.callback(reshard, self.module)
            stack.enter_context(float8_linears(self.float8_layers))
            if self.compiled is not None:
                stack.enter_context(self.compiled.computing())
            elif self.device.type == "cpu":
                stack.enter_context(cpu_kernels(self.module))
            if self.packs:
                is_compiled = self.compiled is not None
                stack.enter_context(packed_rows(self.module, self.kernel, is_compiled))
            if self.routers is not None:
                stack.enter_context(self.routers.replaying())
            yield

    def _resident(
        self, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        return resident(self.module, optimizer, self.sharding, self.device, self.host_blocks)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters as the optimizer sees them: this rank's shards of what is trained."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _copied(self) -> list[nn.Parameter]:
        return [self.module.get_parameter(name) for name in self.copies]

    def named_full_tensors(
        self, on_all_ranks: bool = True, dtype: torch.dtype | None = None, merged: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its Hugging Face name, whole, on the device, one at a time; collective.

        Parameters, in `dtype` or their own, then persistent buffers, always in their own: passes
        read them so. LoRA is `merged` into the weights that it stands beside, or base and factors
        come apart, in their own types. Every rank must run this to its end; unless `on_all_ranks`,
        it is empty on all but rank 0. On one rank these are the live weights: do not write.
        """
        kept = {name for name, _ in persistent_buffers(self.module)}
        if not merged:
            kept |= adapter_parts(self.module)
        arranged = merged_tensors if merged else split_tensors

        def made(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in arranged(self.module, named):
                keeps = dtype is None or name in kept or not tensor.is_floating_point()
                yield name, tensor if keeps else tensor.to(dtype)

        return self._whole(named_state(self.module), made, on_all_ranks)

    def full_trained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, by the names of this module, whole; collective."""
        named = ((n, one) for n, one in self.module.named_parameters() if one.requires_grad)
        return self._whole(named, iter)

    def _whole(
        self, named: Iterable[tuple[str, Tensor]], made: Made, on_all_ranks: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """`made` of these weights when they are whole, and of those of other stages."""
        copies, is_first = self.copies, self.groups.is_first_of_stage
        own = [(name, weight) for name, weight in named if name not in copies]
        with self._resident():
            each = (
                (n, full_tensor(w) if on_all_ranks else tensor_on_first(w, is_first))
                for n, w in own
            )
            whole = made((name, tensor) for name, tensor in each if tensor is not None)
            if self.groups.pp is None:
                yield from whole
                return
            shapes = ((n, torch.empty(w.shape, dtype=w.dtype, device="meta")) for n, w in own)
            facts = [(name, tensor.shape, tensor.dtype) for name, tensor in made(shapes)]
            yield from stage_by_stage(
                self.groups.pp, facts, whole, on_all_ranks, is_first, self.device
            )

    def weights_checksum(self, dtype: torch.dtype | None = None) -> str:
        """A hash of the full weights, cast to `dtype`; equal at every sharding; collective."""
        return checksum_of(self.named_full_tensors(dtype=dtype))
