"""Pipeline parallelism (`parallel.pp`): each rank has the layers of one or more stages.

`StagePlan` divides the layers while the module is whole. `StageSelection` removes the layers of
other ranks. After that, passes go through `PipelineLayers`, in the order of the schedule
(`workers.parallel.pipeline`).

`check_stages` runs before a device is taken. A model class may scale embeddings in its forward
pass, add positions to them, or have layers that read the states of other layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from verl_like.errors import ConfigError
from workers.models.causal_lm import recomputed_layers
from workers.models.memory_shapes import meta_model
from workers.models.support import Support
from workers.parallel.fsdp import begin_pass, note_all_units
from workers.parallel.pipeline import (
    Action,
    NoStages,
    Pipeline,
    StageParts,
    Stages,
    exchange_sum,
    gather_stage_tensors,
    num_chunks,
    stage_ranges,
)
from workers.parallel.placements import local_part
from workers.training.loss import Loss
from workers.training.microbatch import MicroBatches, RowColumns
from workers.training.model_parts.layers import MatrixSplit
from workers.training.passes.forward_backward import Named, Reading
from workers.training.passes.lm_head import DEFAULT, TokenOutputs
from workers.training.passes.packing import model_inputs
from workers.training.sharded_model import Model, ModelPart


class StagePlan(ModelPart):
    """Divides the layers into stages of similar memory."""

    ranges: list[range]

    def change(self, model: Model) -> None:
        """Choose the layers of every stage."""
        self.ranges = check_stages(
            model.module,
            model.support,
            pp=model.dims.pp,
            schedule=model.sharding.pp_schedule,
            ep=model.dims.ep,
            section="parallel",
        )


class StageSelection(ModelPart):
    """Keeps only the layers of this rank's stages in the module."""

    def change(self, model: Model) -> None:
        """Remove the other layers; every rank must call this."""
        config, plan, cut = model.model_config, model.part(StagePlan), model.part(MatrixSplit)
        assert plan is not None, "StagePlan changes the model before StageSelection"
        assert model.groups.pp is not None, "a pipeline has a process group"
        config_here = config if model.spec.trains else replace(config, lora_rank=0)
        model.whole_module = meta_model(config_here, model.head)
        stages, schedule = Stages(model.module, plan.ranges), model.sharding.pp_schedule
        stages.keep(range(model.groups.pp.rank(), len(plan.ranges), model.dims.pp))
        if cut is not None:
            cut.cut.keep_here(model.module)
        pipeline = Pipeline(
            stages,
            model.groups.pp,
            schedule,
            links=model.groups.links(2 * num_chunks(schedule)),
            dtype=model.precision.compute,
            device=model.device,
        )
        model.layers = PipelineLayers(model, pipeline)

    def finish(self, model: Model) -> None:
        """Register the FSDP units of all stages of this rank."""
        if model.is_sharded:
            note_all_units(model.module)


class PipelineLayers:
    """Runs passes on a rank that has some of the layers, with the methods of `AllLayers`."""

    def __init__(self, model: Model, pipeline: Pipeline) -> None:
        self.model, self.pipeline = model, pipeline
        can_recompute = getattr(model.module, "supports_gradient_checkpointing", True)
        again = recomputed_layers(model.model_config, model.device.type, can_recompute)
        self.runs_again = again > 0 and model.spec.replays_routing
        """True if layers are recomputed in a backward pass with the experts that the rows name."""

    @property
    def has_last(self) -> bool:
        """True if this rank has the last layer."""
        return self.pipeline.has_last

    @property
    def copies(self) -> frozenset[str]:
        """Names of weights here that are copies of another rank's: embeddings tied to the head."""
        tied = self.pipeline.stages.tied_to
        return frozenset() if tied is None or not self.has_last else frozenset((tied,))

    def forward(
        self, reading: Reading, micro_batches: MicroBatches, token_outputs: TokenOutputs = DEFAULT
    ) -> Iterator[tuple[RowColumns, int]]:
        """Run forward passes; the last stage yields outputs, other stages send states on."""
        for action in self.pipeline.actions(len(micro_batches), trains=False):
            columns, num_real = micro_batches[action.number]
            shapes = self._shapes(action, reading, columns)
            outputs: RowColumns = {}
            with self.pipeline.computing(action, shapes) as results:
                if self._is_last(action):
                    outputs = reading.outputs(columns, token_outputs)
                else:
                    results += self._states(reading, columns)
            yield outputs, num_real

    def train(
        self, reading: Reading, micro_batches: MicroBatches, loss: Loss
    ) -> Iterator[tuple[RowColumns, RowColumns, int, list[Tensor]]]:
        """Run the passes in the schedule's order; the last stage yields what `AllLayers` yields."""
        num_left = len(micro_batches) * num_chunks(self.pipeline.kind)
        for action in self.pipeline.actions(len(micro_batches)):
            columns, num_real = micro_batches[action.number]
            if not action.is_forward:
                num_left -= 1
                if self.runs_again:
                    reading.feeds(columns)
                strategy, waits = self.model.sharding.strategy, len(self.pipeline.waiting) > 1
                module, is_one_unit = self.model.module, self.model.is_one_unit
                begin_pass(module, is_one_unit, num_left == 0, strategy, waits)
                self.pipeline.backward(action)
                continue
            shapes = self._shapes(action, reading, columns)
            with self.pipeline.computing(action, shapes) as results:
                if self._is_last(action):
                    yield reading.outputs(columns, loss.token_outputs), columns, num_real, results
                else:
                    results += self._states(reading, columns, loss)

    def _is_last(self, action: Action) -> bool:
        """True if the action produces the model's outputs."""
        return self.pipeline.stage_of(action) == self.pipeline.last

    def _states(
        self, reading: Reading, columns: RowColumns, loss: Loss | None = None
    ) -> list[Tensor]:
        """Return the states for the next stage, and the terms that this stage adds to the loss."""
        module = self.model.module
        states = [module(**model_inputs(module, feed)) for feed in reading.feeds(columns)]
        if loss is not None and loss.stage_terms is not None:
            states += loss.stage_terms(columns)
        return states

    def _shapes(
        self, action: Action, reading: Reading, columns: RowColumns
    ) -> list[tuple[int, ...]]:
        """Return the shapes of the states from the previous stage; the first stage has none."""
        if self.pipeline.stage_of(action) == 0:
            return []
        width = self.model.module.config.get_text_config().hidden_size
        feeds = reading.feeds(columns)
        return [(*feed.inputs["input_ids"].shape, width) for feed in feeds]

    def from_last(self, result: Any) -> Any:
        """Return the result of the rank with the last layer, on all ranks."""
        return self.pipeline.from_last(result)

    def sum_tied_gradients(self) -> None:
        """Sum the gradient of a weight that is the embedding of one stage and the head of
        another.
        """
        name, line = self.pipeline.stages.tied_to, self.pipeline.line
        if name is None:
            return
        weight = self.model.module.get_parameter(name)
        if not weight.requires_grad:
            return
        gradient = local_part(weight.grad)
        gradient.copy_(exchange_sum(gradient, line))

    def gather_stages(self, tensors: Named, shapes: Named, on_all_ranks: bool) -> Named:
        """Yield the tensors of all stages; `shapes` describes the tensors of this rank."""
        layouts = [(name, tensor.shape, tensor.dtype) for name, tensor in shapes]
        is_first, line = self.model.groups.is_first_of_stage, self.pipeline.line
        return gather_stage_tensors(
            line, layouts, tensors, on_all_ranks, is_first, self.model.device
        )


def check_stages(
    module: Any, support: Support, pp: int, schedule: str, ep: int, section: str
) -> list[range]:
    """Return the layers of every stage; reject a model that cannot be split into that many stages.

    The model may be on the meta device. `section` is the key of its `parallel` section.
    """
    setting, model_type = f"{section}.pp={pp}", support.model_type
    num_stages = pp * num_chunks(schedule)
    try:
        parts = StageParts.of(module)
        if num_stages > len(parts.layers):
            raise ConfigError(
                f"{setting} with {section}.pp_schedule={schedule} makes {num_stages} stages of "
                f"the {len(parts.layers)} layers of {model_type}. Set "
                f"{section}.pp to at most {max(len(parts.layers) // num_chunks(schedule), 1)}."
            )
        reason = support.why_not("stages")
        if reason:
            raise NoStages(reason)
        ranges = stage_ranges(module, num_stages, ep)
    except NoStages as error:
        raise ConfigError(
            f"{setting}: model type {model_type} cannot be split into stages: {error}. Set "
            f"{section}.pp=1; {section}.shard divides weights."
        ) from error
    trained = {id(weight) for weight in module.parameters() if weight.requires_grad}
    stages = Stages(module, ranges)
    idle = [number for number in range(num_stages) if trained.isdisjoint(stages.weights([number]))]
    if trained and idle:
        raise ConfigError(
            f"{setting}: nothing in stage {idle[0]} is trained, because of "
            "target_modules in the model's section. Set "
            f"{section}.pp=1, or target_modules=all-linear."
        )
    return ranges
