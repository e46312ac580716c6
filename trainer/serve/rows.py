"""Turn the datums of a request into rows of a batch, and per-row results into per-datum results.

    loss = loss_of(message, role, aliases)
    datums = read_datums(message, loss, limits)     # checked: shapes, numbers, ids, lengths
    batch = batch_of(datums, loss)
    results = datum_values(datums, outputs)

A datum has N input tokens and N targets, which the client has already shifted. Its row has N + 1
tokens, of which the last is never read. The targets are the row's response, and their log-probs are
computed at the input tokens. A datum with K targets per token becomes K rows, whose losses add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import OmegaConf

from trainer import ppo
from trainer.config.checks import check_value
from trainer.config.keys import keys_by_name
from trainer.data.lm_rows import LMRow, image_column, lm_columns
from trainer.serve.bodies import Array, chunks_of, tensor_of
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import BatchError, nearest
from workers.config import ActorConfig, CriticConfig
from workers.losses.token_sums import BOUNDS, LossInputs, TokenSum
from workers.roles.served import LOSS_PREFIX, MASK, SETTINGS, client_loss

if TYPE_CHECKING:
    from workers.images import ImageRef

TARGETS = "target_tokens"
PRESETS = Path(ppo.__file__).with_name("algorithm")
LOSS_KEYS = {"clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode"}
FORMATS = ("png", "jpeg")
"""Formats of images in the protocol."""
MAX_ENTRIES = 2**25
"""Maximum entries of a request's loss inputs, which can exceed the bytes of sparse tensors."""


@dataclass(frozen=True)
class Limits:
    """Limits on the tokens of a client's requests."""

    vocabulary: int
    prompt: int
    """Longest prompt for sampling, in tokens."""
    response: int
    """Longest sampled response, in tokens."""
    model: str = ""
    """The model's folder, which has the image processor."""

    @property
    def context(self) -> int:
        """Longest row of a training request, in tokens."""
        return self.prompt + self.response

    def joined(self, chunks: Sequence[Any], subject: str) -> tuple[list[int], list[ImageRef]]:
        """Return the tokens of lists of tokens and of images, joined, and the images.

        An image has `data`, `format`, and `expected_tokens` or 0.
        """
        tokens: list[int] = []
        images: list[ImageRef] = []
        for number, chunk in enumerate(chunks):
            if isinstance(chunk, list):
                tokens += chunk
                continue
            where = f"{subject}: chunk {number}"
            if chunk.format not in FORMATS:
                known = " or ".join(FORMATS)
                raise BatchError(
                    f"{where} is an image of the format {chunk.format!r}, not {known}."
                )
            from workers.images import image_ref
            from workers.models.images import image_reader

            try:
                reader, ref = image_reader(self.model), image_ref(chunk.data)
            except ValueError as error:
                raise BatchError(f"{where}: {error}") from error
            ids = reader.ids_of(ref)
            if chunk.expected_tokens not in (None, 0, len(ids)):
                raise BatchError(
                    f"{where}: this model reads the image of {ref.width} x {ref.height} pixels as "
                    f"{len(ids)} tokens, but expected_tokens={chunk.expected_tokens}."
                )
            tokens += ids
            images.append(ref)
        if images and any(reader.token_id in chunk for chunk in chunks if isinstance(chunk, list)):
            raise BatchError(
                f"{subject}: its text has the token {reader.token_id}, which stands for an image. "
                "Send images only as image chunks."
            )
        return tokens, images

    def check_tokens(self, tokens: Array, subject: str, longest: int | None = None) -> None:
        """Reject ids outside the vocabulary, and rows that are empty or too long."""
        keys = "data.max_prompt_length" + ("" if longest else " + data.max_response_length")
        longest = longest or self.context
        if not 1 <= len(tokens) <= longest:
            raise BatchError(f"{subject} has {len(tokens)} tokens; 1 to {longest} fit ({keys}).")
        outside = np.argwhere((tokens < 0) | (tokens >= self.vocabulary))
        if len(outside):
            place = tuple(outside[0].tolist())
            raise BatchError(
                f"{subject}: {tokens[place]} at {[*place]} is outside the vocabulary of "
                f"{self.vocabulary}."
            )


@dataclass(frozen=True)
class Datum:
    """A client's datum: the input ids, and the loss inputs by name, each [N] or [N, K]."""

    tokens: Sequence[int]
    inputs: Mapping[str, Array]
    images: Sequence[ImageRef] = ()

    @property
    def targets(self) -> Array:
        """The targets of each token, [N] or [N, K]."""
        return self.inputs[TARGETS]


@dataclass(frozen=True)
class RequestLoss:
    """The loss of a request, the loss inputs that it reads, and its checked settings."""

    name: str
    inputs: LossInputs
    settings: dict[str, Any]


NO_LOSS = RequestLoss("", LossInputs(()), {})


def read_datums(message: Any, loss: RequestLoss, limits: Limits) -> list[Datum]:
    """Check the datums of a request, and return them with the inputs that the loss reads.

    A forward-only request needs more than the targets only if its loss is a sum over tokens.
    """
    if not message.data:
        raise BatchError("the request has no datums. Send at least one.")
    inputs = loss.inputs
    is_computed = not message.forward_only or isinstance(inputs, TokenSum)
    needed = (TARGETS, *inputs.needed_columns) if is_computed else (TARGETS,)
    optional = {*inputs.needed_columns, *inputs.optional_columns}
    datums: list[Datum] = []
    tensors = [entry.value for sent in message.data for entry in sent.loss_fn_inputs]
    entries = sum(abs(math.prod(tensor.shape)) for tensor in tensors)
    if entries > MAX_ENTRIES:
        raise BatchError(
            f"{entries} entries exceed the limit of {MAX_ENTRIES} per request; send fewer."
        )
    for number, sent in enumerate(message.data):
        subject = f"datum {number}"
        tokens, images = limits.joined(chunks_of(sent.model_input, subject), subject)
        limits.check_tokens(np.asarray(tokens), subject)
        fields = {entry.key: entry.value for entry in sent.loss_fn_inputs}
        for name in needed:
            if name not in fields:
                raise BatchError(
                    f"{subject}: the loss {loss.name} needs loss_fn_inputs[{name!r}]; the datum "
                    f"has {', '.join(fields) or 'none'}.{nearest(name, fields)}"
                )
        names = [*needed, *sorted(fields.keys() & optional - {*needed})]
        tensors_of = {name: tensor_of(fields[name], f"{subject}, {name}") for name in names}
        shape = tensors_of[TARGETS].shape
        for name, values in tensors_of.items():
            if values.shape != shape or len(shape) > 2 or shape[0] != len(tokens) or 0 in shape:
                raise BatchError(
                    f"{subject}: {name} has shape {[*values.shape]} for {len(tokens)} input tokens "
                    f"and {TARGETS} of shape {[*shape]}. Both shapes must be [{len(tokens)}], or "
                    f"[{len(tokens)}, K] for K targets per token."
                )
            if not np.isfinite(values).all():
                place = np.argwhere(~np.isfinite(values))[0].tolist()
                raise BatchError(f"{subject}: {name} is {values[tuple(place)]} at {place}.")
        targets = tensors_of[TARGETS]
        if targets.dtype.kind != "i":
            raise BatchError(f"{subject}: {TARGETS} are {targets.dtype}, not integers.")
        limits.check_tokens(targets, f"{subject}, {TARGETS}")
        if {*BOUNDS} & tensors_of.keys():
            low, high = (
                np.broadcast_to(tensors_of.get(bound, loss.settings[bound]), shape)
                for bound in BOUNDS
            )
            for place in map(tuple, np.argwhere(low > high)[:1].tolist()):
                raise BatchError(
                    f"{subject}: {BOUNDS[0]}={low[place]} at {[*place]} is above "
                    f"{BOUNDS[1]}={high[place]}."
                )
        datums.append(Datum(tokens, tensors_of, images))
    return datums


def loss_of(message: Any, role: str, aliases: Mapping[str, str]) -> RequestLoss:
    """Check the loss of a request and its settings, and return them."""
    name: str = aliases.get(message.loss_fn, message.loss_fn)
    loss, preset = algorithm_losses().get(name, (name, {}))
    settings = {**preset, **{entry.key: entry.value for entry in message.loss_fn_config}}
    for entry in message.loss_fn_config_v2:
        is_text = entry.value.HasField("text")
        settings[entry.key] = entry.value.text if is_text else entry.value.number
    keys = keys_by_name(CriticConfig if role == "critic" else ActorConfig)
    for setting, value in settings.items():
        if value != value:
            raise BatchError(f"the loss {loss}: its setting {setting} is NaN. Use a number.")
        if loss.startswith(LOSS_PREFIX) and setting in keys:
            is_text = bool(keys[setting].rules.choices)
            if is_text != isinstance(value, str):
                kind = "a text" if is_text else "a number"
                raise BatchError(f"the loss {loss}: {setting}={value!r} must be {kind}.")
            check_value(keys[setting], value)
    inputs = client_loss(loss, role)
    return RequestLoss(loss, inputs, inputs.checked(loss, settings))


@cache
def algorithm_losses() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the policy loss and settings of each preset that `LOSS_KEYS` can express."""
    losses = {}
    for file in PRESETS.glob("*.yaml"):
        actor: Any = OmegaConf.to_container(OmegaConf.load(file).actor_rollout_ref.actor)
        loss = actor.pop("policy_loss")
        actor.pop("ppo_mini_batch_size", None)
        if actor.keys() <= LOSS_KEYS:
            losses[f"{LOSS_PREFIX}{file.stem}"] = f"{LOSS_PREFIX}{loss['loss_mode']}", actor
    return losses


def batch_of(datums: Sequence[Datum], loss: RequestLoss = NO_LOSS) -> DataProto:
    """Return the datums as a batch of rows with the columns that a pass and the loss read."""
    names = {name for datum in datums for name in datum.inputs}
    if MASK in loss.inputs.columns:
        names.add(MASK)
    rows: list[LMRow] = []
    values: dict[str, list[torch.Tensor]] = {name: [] for name in sorted(names)}
    for number, datum in enumerate(datums):
        inputs = {MASK: np.ones_like(datum.targets), **datum.inputs}
        lacking = names - inputs.keys()
        if lacking:
            raise BatchError(
                f"datum {number} has no {lacking.pop()}, which other datums have. Send it for all "
                "datums or for none."
            )
        for target in np.atleast_2d(datum.targets.T):
            ids = np.append(datum.tokens, target[-1])
            rows.append(LMRow(ids, np.ones(len(ids), bool), datum.images))
        for name, of_name in values.items():
            of_name += map(torch.tensor, np.atleast_2d(inputs[name].T))
    columns = lm_columns(rows, pad_token_id=0)
    targets = torch.cat(values.pop(TARGETS)).long()
    columns["responses"] = columns["responses"].with_values(targets)
    for name, of_name in values.items():
        columns[name] = columns["responses"].with_values(torch.cat(of_name).float())
    return DataProto.from_dict(columns, image_column(rows), {SETTINGS: loss.settings})


def datum_values(datums: Sequence[Datum], column: RaggedTensor) -> list[Array]:
    """Return the values of each datum's targets, in the shape of the targets."""
    rows = iter(column.rows())
    results = []
    for datum in datums:
        shape = datum.targets.shape
        values = [next(rows).numpy() for _ in range(math.prod(shape[1:]))]
        results.append(np.stack(values, axis=1).reshape(shape))
    return results
