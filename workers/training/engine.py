"""The one training engine: a causal LM over its ranks that scores rows and takes optimizer steps.

Every role that has a model (actor, critic, reference, reward model) owns one `TrainEngine` and adds
what is its own: a loss.

    engine = TrainEngine(model_config, fsdp_config, head="token", optim_config=optim)
    engine.build(worker, total_steps)           # opens the process group, shards, loads
    columns = engine.forward_rows(data, Budget(tokens=16384))    # {"log_probs": [rows, R]}
    metrics = engine.update(
        data, names, mini_batch_size=64, budget=Budget(rows=8), epochs=1, loss_fn=loss_fn
    )

The loss function gets what the model says about a micro-batch, its columns, and the counts of the
whole mini-batch. It returns its share of the loss and of every metric: shares are added over
micro-batches and the ranks with unlike rows (`workers.parallel.groups`). So neither the cut nor the
number of ranks changes a result beyond float rounding.

Rows run without their padding where that is proven right (`workers.training.row_proof`). The
strategies and the mesh are in `workers.parallel.fsdp`. On one rank, and under strategy ddp without
tensor parallelism, the module is a plain one, so that a rollout engine in the same process can read
it by reference.

Engines for other rows extend it: one number a row (`score_engine`), pairs of rows (`pairs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from verl_like.batch.ragged import Column, Ragged, rectangle_of
from workers.models.attention import say_once
from workers.models.causal_lm import Head, empty_model, to_training
from workers.models.load import load_weights
from workers.models.lora import adapter_parts, add_adapter, merged_tensors, split_tensors
from workers.models.precision import computing_in, frozen, precision_of
from workers.models.quantize import quantize_linears
from workers.models.routing import COLUMN as ROUTED
from workers.models.routing import Routers
from workers.models.state import named_state, persistent_buffers
from workers.parallel import tensor as tensor_parallel
from workers.parallel.experts import spread_experts
from workers.parallel.fsdp import (
    add_up_gradients,
    begin_pass,
    full_tensor,
    reshard,
    resident,
    shard,
    tensor_on_first,
)
from workers.parallel.groups import Groups
from workers.parallel.sharding import dims_of, settle
from workers.training.attention import describe, packed_rows
from workers.training.lm_head import DEFAULT, Wanted, token_columns
from workers.training.microbatch import (
    Budget,
    Columns,
    MiniBatch,
    RowColumns,
    Rows,
    all_reduce,
    count_mini_batches,
    passes,
)
from workers.training.moved import count_moved, moved_share, sample_weights
from workers.training.nonfinite_guard import NonfiniteGuard
from workers.training.on_cpu import cpu_kernels, prepare_cpu_process
from workers.training.optim import Schedule, build_optimizer, guarded_step
from workers.training.packing import Feed, check_rows, read, response_reads
from workers.training.row_proof import RowPasses, prove_rows
from workers.training.shuffle import order_columns, passes_over, steps_over
from workers.training.varlen import find_kernel
from workers.weights.checksum import checksum_of

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
    from verl_like.process.worker import Worker
    from workers.config import FrozenFSDPConfig, ModelConfig, OptimConfig, ParallelConfig

LossFn = Callable[[Columns, Columns, MiniBatch], tuple[Tensor, dict[str, Tensor]]]
"""(model outputs, columns, mini-batch counts) -> (share of the loss, shares of the metrics)."""
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

        self.dims = dims_of(worker.world_size, self.sharding)
        self.groups = Groups(self.dims, self.device)
        self.is_sharded = self.groups.loss is not None and self.sharding.strategy != "ddp"

        trained = self.optim_config is not None
        if not trained:
            self.model_config = frozen(self.model_config, self.device.type)
        precision = precision_of(self.model_config, self.device.type)
        self.module: Any = empty_model(self.model_config, self.head, self.device)
        if not trained:
            self.module.requires_grad_(False)  # what its class freezes, training leaves frozen
            if self.quantization:
                quantize_linears(self.module, self.device)
        if trained and self.model_config.lora_rank > 0:
            add_adapter(self.module, self.model_config)
        self.cut: tensor_parallel.Cut | None = None
        if self.groups.tp is not None:
            tensor_parallel.check(self.module, self.dims.tp, "parallel.tp")
            self.cut = tensor_parallel.apply(self.module, self.groups.mesh["tp"])
        if self.is_sharded:
            mesh, strategy = self.groups.fsdp_mesh, self.sharding.strategy
            efsdp_mesh = None
            if self.dims.ep > 1:
                spread_experts(self.module, self.groups.ep_mesh)
                efsdp_mesh = self.groups.efsdp_mesh
            self.is_one_unit = shard(self.module, mesh, precision.cast, strategy, efsdp_mesh)
        self.cast = None if self.is_sharded else precision.cast  # FSDP casts what it gathers
        load_weights(self.module, self.model_config, self.head, self.device)

        if self.optim_config is not None:
            self.optimizer = build_optimizer(self.parameters(), self.optim_config)
            self.guard = NonfiniteGuard(self.optim_config.max_skipped_steps, self.groups)
            self.scheduler = Schedule(self.optimizer, self.optim_config, total_steps)

        if self.replays_routing:
            self.routers = Routers(self.module)

        wanted = self.model_config.attn_implementation
        self.kernel, why_not = find_kernel(wanted, self.device, precision.compute)
        rows = {
            "may_pack": self.model_config.use_remove_padding,
            "group": self.groups.sp,
            "cut_over": self.groups.tp,
        }
        with self.running(), computing_in(self.module, self.cast):
            self.row_passes = prove_rows(self.module, self.device, self.kernel, **rows)
        say_once(describe(self.module, self.packs, self.kernel, why_not))

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every weight, as a plain tensor."""
        return self.cut is None and not self.is_sharded

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
        rows = self._take(data, (*self.forward_inputs, *names))
        cuts = self._cut(rows.columns, budget)
        pieces: dict[str, list[Column]] = {}
        self.module.eval()
        with torch.no_grad(), self.running(), computing_in(self.module, self.cast):
            for columns, real, _ in passes(rows.columns, cuts, self.groups.data, self.device):
                found = self.outputs(columns, wanted)
                for name, column in found.items():
                    pieces.setdefault(name, []).append(column[:real])
        return {name: rows.restore(columns, cuts) for name, columns in pieces.items()}

    def update(
        self,
        data: DataProto,
        names: Sequence[str],
        *,
        mini_batch_size: int,
        budget: Budget,
        epochs: int,
        loss_fn: LossFn,
        wanted: Wanted = DEFAULT,
        shuffle_seed: int | None = None,
        beside: Sequence[tuple[DataProto, LossFn]] = (),
    ) -> dict[str, float]:
        """One optimizer step per mini-batch and epoch, the samples reshuffled if there is a seed.

        The metrics are means over the steps that were not skipped. Of the rows `beside` every step
        has its share, and adds the gradient of their loss to its own.
        """
        assert self.optimizer is not None, "a frozen engine was asked for an update"
        rows = self._take(data, (*INPUTS, *names, *order_columns(shuffle_seed)))
        count = count_mini_batches(rows.total, mini_batch_size)
        others = [(self._take(more, INPUTS), its_loss) for more, its_loss in beside]
        to_training(self.module)

        is_first = self.scheduler.num_steps == 0
        before = sample_weights(self.parameters()) if is_first else []
        steps: list[dict[str, float]] = []
        orders = passes_over(rows, epochs, shuffle_seed, self.scheduler.num_steps)
        with self.running(self.optimizer):
            data_ranks = self.groups.data
            for batch, more in steps_over(orders, count, others, data_ranks, self.device):
                try:
                    metrics = self.accumulate(batch, budget, loss_fn, wanted, more)
                except BaseException:
                    # a part of a mini-batch must not reach the next update
                    self.optimizer.zero_grad(set_to_none=True)
                    raise
                norm = guarded_step(self.optimizer, self.parameters(), self.grad_clip, self.groups)
                self.guard.note(norm, batch.names)
                steps.append({**metrics, "grad_norm": norm})
        self.module.eval()

        taken = [step for step in steps if math.isfinite(step["grad_norm"])]
        result = _mean_metrics(taken or steps)
        if is_first and taken:
            counts = count_moved(before, self.parameters(), self.device)
            counts = all_reduce(counts, self.groups.world)
            result["moved_share"] = moved_share(*counts.tolist(), self.scheduler.lr)
        result["lr"] = self.scheduler.lr
        result["skipped_steps"] = float(len(steps) - len(taken))
        self.scheduler.step()
        return result

    def accumulate(
        self,
        batch: MiniBatch,
        budget: Budget,
        loss_fn: LossFn,
        wanted: Wanted = DEFAULT,
        beside: Sequence[tuple[MiniBatch, LossFn]] = (),
    ) -> dict[str, float]:
        """Add the gradients of one mini-batch, and of others with a loss of their own `beside` it.

        Gives their metrics, added over micro-batches and over the ranks with unlike rows.
        """
        totals = self._run_passes(batch, budget, loss_fn, wanted)
        for other, its_loss in beside:
            totals |= self._run_passes(other, budget, its_loss)
        if not self.is_sharded:
            add_up_gradients(self.parameters(), self.groups.loss)
        if self.cut is not None:
            self.cut.add_up_gradients()
        summed = all_reduce(torch.stack(list(totals.values())), self.groups.data)
        return dict(zip(totals, summed.tolist(), strict=True))

    def _run_passes(
        self, batch: MiniBatch, budget: Budget, loss_fn: LossFn, wanted: Wanted = DEFAULT
    ) -> dict[str, Tensor]:
        """Forward and backward passes over a mini-batch; this rank's shares of its metrics."""
        totals: dict[str, Tensor] = {}
        cuts = self._cut(batch.columns, budget)
        data_ranks = self.groups.data
        for columns, num_real, last in passes(batch.columns, cuts, data_ranks, self.device):
            if self.is_sharded:
                begin_pass(self.module, self.is_one_unit, last, self.sharding.strategy)
            with computing_in(self.module, self.cast):
                outputs = self.outputs(columns, wanted)
                # losses are formulas of rectangles
                said = {name: rectangle_of(column) for name, column in outputs.items()}
                for_loss = columns.keys() - {ROUTED}
                asked = {name: self._for_loss(columns[name]) for name in for_loss}
                loss, shares = loss_fn(said, asked, batch)
                # a loss that is not finite has a gradient of NaN, also where its formula clamps
                seed = 1 + (loss.detach() - loss.detach())
                loss.backward(seed)

            for name, share in shares.items():
                if num_real:
                    share = share.detach().float()
                else:  # a dummy adds nothing
                    share = torch.zeros((), device=self.device)
                totals[name] = totals[name] + share if name in totals else share
        return totals

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
                feed.own(columns["responses"].values[inside]).to(self.device),
                wanted,
                may_chunk=self.model_config.use_fused_kernels,
                words=None if self.cut is None else self.cut.words,
            )
        else:
            found = {"values": read(self.module, feed)[:, 0].float()}
        found = feed.gathered(found)

        inside = inside.to(self.device)
        zeros = next(iter(found.values())).new_zeros(len(inside))
        return {
            name: mask.with_values(zeros.masked_scatter(inside, column))
            for name, column in found.items()
        }

    def _for_loss(self, column: Column) -> Tensor:
        values = rectangle_of(column.to(self.device, non_blocking=True))
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

    def _take(self, data: DataProto, names: Sequence[str]) -> Rows:
        rows = Rows.take(data, names, self.dims.data_size)
        check_rows(self.module, rows.columns["input_ids"])
        if self.routers is not None and ROUTED in rows.columns:
            self.routers.check(rows.columns[ROUTED].values)
        return rows

    def _cut(self, columns: RowColumns, budget: Budget) -> list[list[int]]:
        """The rows of every pass."""
        return self.row_passes.cut(self.reads(columns), budget)

    @contextmanager
    def running(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Within, the module (and the optimizer's state) is ready to compute on the device.

        Packed rows attend row by row, and on a CPU linear layers go through oneDNN. What forward
        passes left whole of a sharded module is a shard again in the end.
        """
        with ExitStack() as stack:
            stack.enter_context(resident(self.module, optimizer, self.sharding, self.device))
            if self.is_sharded:
                stack.callback(reshard, self.module)
            if self.device.type == "cpu":
                stack.enter_context(cpu_kernels(self.module))
            if self.packs:
                stack.enter_context(packed_rows(self.module, self.kernel))
            if self.routers is not None:
                stack.enter_context(self.routers.replaying())
            yield

    def parameters(self) -> list[nn.Parameter]:
        """The parameters as the optimizer sees them: this rank's shards of what is trained."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

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
        with resident(self.module, None, self.sharding, self.device):
            whole = full_tensor if on_all_ranks else tensor_on_first
            named = ((name, whole(weight)) for name, weight in named_state(self.module))
            for name, tensor in arranged(
                self.module, ((name, tensor) for name, tensor in named if tensor is not None)
            ):
                keeps = dtype is None or name in kept or not tensor.is_floating_point()
                yield name, tensor if keeps else tensor.to(dtype)

    def weights_checksum(self, dtype: torch.dtype | None = None) -> str:
        """A hash of the full weights, cast to `dtype`; equal at every sharding; collective."""
        return checksum_of(self.named_full_tensors(dtype=dtype))


def _mean_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
