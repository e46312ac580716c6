"""Bodies of requests and responses as the protocol defines them: JSON, and protobuf messages.

Unknown fields are ignored, except in `Adam`. The fields of a body come from the JSON object, the
query and the path.

Tensors of protobuf messages become numpy arrays:

    request = parse("ForwardBackwardRequest", body)
    body = training_output("logprobs", [log_probs_of_datum, ...], {"loss:sum": 1.5})

`messages.proto` defines the messages. They have their own descriptor pool, so that the SDK can be
imported in the same process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import ArrayLike
from pydantic import (
    AfterValidator,
    Base64Bytes,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    Tag,
    ValidationError,
)

from verl_like.errors import BatchError

JsonObject = dict[str, Any]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)] | None
"""Time to live in seconds, from an hour to ten years; without it, a checkpoint never expires."""
No = Literal[0]
TopK = Annotated[int, Field(ge=0, le=128)]
Stop = list[Natural] | list[Annotated[str, Field(min_length=1)]]


def _finite(metadata: JsonObject) -> JsonObject:
    json.dumps(metadata, allow_nan=False)  # raises ValueError
    return metadata


Metadata = Annotated[JsonObject, AfterValidator(_finite)] | None


class Body(BaseModel):
    """Base class of the request bodies, and the body of a handler without parameters."""

    model_config = ConfigDict(allow_inf_nan=False, protected_namespaces=())


class LoraBody(Body):
    """An adapter: its rank (0 means all weights), and the parts of the model that it trains."""

    rank: Annotated[int, Field(ge=0, le=4096)] = 32
    seed: Seed | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class Optimizer(Body):
    """The optimizer of a model: always AdamW."""

    type: Literal["adamw"] = "adamw"


class Adam(Body):
    """The settings of one optimizer step."""

    model_config = ConfigDict(extra="forbid")
    type: str | None = None
    learning_rate: NonNegativeFloat = 1e-4
    beta1: Below1 = 0.9
    beta2: Below1 = 0.95
    eps: NonNegativeFloat = 1e-12
    weight_decay: NonNegativeFloat = 0.0
    grad_clip_norm: NonNegativeFloat = 0.0


class Save(Body):
    """A request to save a checkpoint or a sampler."""

    model_id: str
    seq_id: Positive
    path: str | None = None
    ttl_seconds: Ttl = None
    overwrite: bool | None = None
    user_metadata: Metadata = None
    sampling_session_seq_id: Int64 | None = None


class TextChunk(Body):
    """A part of a prompt, as tokens."""

    tokens: list[Int64]


class ImageChunk(Body):
    """A part of a prompt, as an image."""

    type: Literal["image"]
    data: Base64Bytes
    format: str
    expected_tokens: Natural | None = None


def _kind(chunk: Any) -> str:
    kind = chunk.get("type") if isinstance(chunk, dict) else getattr(chunk, "type", None)
    return "image" if kind == "image" else "encoded_text"


class Prompt(Body):
    """The chunks of a prompt."""

    chunks: list[
        Annotated[
            Annotated[TextChunk, Tag("encoded_text")] | Annotated[ImageChunk, Tag("image")],
            Discriminator(_kind),
        ]
    ]


class SamplingBody(Body):
    """Sampling parameters; without `stop`, the model's stop tokens apply."""

    max_tokens: Positive | None = None
    seed: Seed | None = None
    stop: Annotated[Stop | None, BeforeValidator(lambda s: [s] if isinstance(s, str) else s)] = None
    temperature: NonNegativeFloat = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class DenseTensor(Body):
    """A tensor of integers in JSON."""

    data: list[Int64]
    shape: tuple[Natural, Natural]
    sparse_crow_indices: None = None


class SampleBody(Body):
    """A request for samples of a prompt."""

    sampling_session_id: str
    seq_id: Int64
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    prompt: Prompt
    sampling_params: SamplingBody = SamplingBody()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Positive | None = None
    target_prompt_logprobs: DenseTensor | None = None
    topk_prompt_logprobs: TopK = 0
    # the likeliest tokens of samples, and sampled tokens at prompt positions, are not supported
    topk_sample_logprobs: No = 0
    prompt_alt_tokens_k: No = 0


def page(name: str, items: Sequence[Any], limit: int, offset: int) -> JsonObject:
    """Return one page of a list under `name`, and the cursor of that page."""
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}


def fault_of(error: ValidationError) -> str:
    """Return the first fault of an object: the place, the value, and the reason."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "the body"
    return f"{where}={str(first['input'])[:80]!r}: {first['msg']}"


Array = np.ndarray[Any, Any]
PROTOBUF = "application/x-protobuf"
KINDS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
MESSAGE = re.compile(r"message (\w+) {([^}]*)}")
FIELD = re.compile(r"(repeated )?(\w+) (\w+) = (\d+);")
DTYPES: dict[int, Any] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32 = 1
STOP_REASONS = {"stop": 0, "length": 1}


def _messages() -> dict[str, Any]:
    """Return the classes of `messages.proto`; only the syntax that this file uses is parsed."""
    text = Path(__file__).with_name("messages.proto").read_text()
    file = descriptor_pb2.FileDescriptorProto(name="serve.proto", package="serve", syntax="proto2")
    for name, fields in MESSAGE.findall(text):
        message = file.message_type.add(name=name)
        for repeated, kind, field, number in FIELD.findall(fields):
            added = message.field.add(name=field, number=int(number), label=3 if repeated else 1)
            added.type = KINDS.get(kind, 11)
            if kind not in KINDS:
                added.type_name = f".serve.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    types = pool.FindFileByName("serve.proto").message_types_by_name
    return {name: message_factory.GetMessageClass(kind) for name, kind in types.items()}


CLASSES = _messages()


def parse(name: str, body: bytes) -> Any:
    """Parse these bytes as the message `name`."""
    message = CLASSES[name]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BatchError(f"the body of {len(body)} bytes is not a {name}: {error}") from error
    return message


def tensor_of(message: Any, subject: str) -> Array:
    """Return a tensor as a dense array, with 0 for entries that a sparse tensor omits."""
    shape = [*message.shape]
    try:
        dtype = DTYPES[message.dtype]
        if not message.HasField("sparse_csr"):
            values: Array = np.frombuffer(message.dense, dtype)
            return values.reshape(shape) if shape else values
        sparse, (rows, width) = message.sparse_csr, shape
        ends, columns = (np.frombuffer(b, "<i8") for b in (sparse.crow_indices, sparse.col_indices))
        if len(ends) != rows + 1:
            raise ValueError(
                f"a sparse tensor of {rows} rows needs {rows + 1} row pointers, not {len(ends)}"
            )
        dense: Array = np.zeros((rows, width), dtype)
        places = np.repeat(np.arange(rows), np.diff(ends))
        dense[places, columns] = np.frombuffer(sparse.values, dtype)
        return dense
    except (KeyError, ValueError, IndexError) as error:
        raise BatchError(
            f"{subject} cannot be read as a tensor of shape {shape} and dtype {message.dtype} "
            f"(1 is float32, 2 int64, 3 int32): {error}"
        ) from error


def chunks_of(chunks: Sequence[Any], subject: str) -> list[Any]:
    """Return the chunks of a model input: lists of tokens, and the messages of images."""
    read: list[Any] = []
    for number, chunk in enumerate(chunks):
        if chunk.HasField("image"):
            read.append(chunk.image)
            continue
        if not chunk.HasField("encoded_text"):
            raise BatchError(
                f"{subject}: chunk {number} is neither text nor an image; audio is not supported."
            )
        if len(chunk.encoded_text.tokens) % 4:
            raise BatchError(f"{subject}: chunk {number} is not an array of int32.")
        read.append(np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist())
    return read


def training_output(field: str, outputs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Return the result of a forward or backward pass: `field` for each datum, and metrics."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    rows = [np.ascontiguousarray(row, "<f4") for row in outputs]
    for trailing_shape, group in groupby(rows, lambda row: row.shape[1:]):
        datums = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(datums))
        tensor = record.fields.add(key=field).value
        tensor.data = b"".join(row.tobytes() for row in datums)
        tensor.offsets = np.cumsum([0, *(row.nbytes for row in datums)]).astype("<i8").tobytes()
        tensor.dtype = FLOAT32
        tensor.trailing_shape.extend(trailing_shape)
    for name, value in metrics.items():
        message.metrics.add(key=name, value=value)
    return bytes(message.SerializeToString())


def sample_output(
    sequences: Sequence[tuple[ArrayLike, ArrayLike, str]],
    prompt_log_probs: Array | None = None,
    targets: Array | None = None,
    top_tokens: tuple[Array, Array] | None = None,
) -> bytes:
    """Return the result of a sample request: tokens, log-probs and stop reason of each sequence."""
    message = CLASSES["SampleResponse"](prompt_cache_hit_tokens=0)
    for tokens, log_probs, reason in sequences:
        message.sequences.add(
            stop_reason=STOP_REASONS[reason],
            tokens=np.asarray(tokens, "<i4").tobytes(),
            logprobs=np.asarray(log_probs, "<f4").tobytes(),
        )
    if prompt_log_probs is not None:
        message.prompt_logprobs = np.asarray(prompt_log_probs, "<f4").tobytes()
    if targets is not None:
        tensor = message.target_prompt_logprobs
        tensor.dense, tensor.dtype = np.asarray(targets, "<f4").tobytes(), FLOAT32
        tensor.shape.extend(targets.shape)
    if top_tokens is not None:
        ids, log_probs = top_tokens
        top = message.topk_prompt_logprobs
        top.token_ids, top.logprobs = ids.astype("<i4").tobytes(), log_probs.astype("<f4").tobytes()
        top.length, top.k = ids.shape
    return bytes(message.SerializeToString())
