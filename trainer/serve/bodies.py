"""Bodies of requests as the protocol defines them; unknown fields are ignored, except in `Adam`.

The fields of a body come from the JSON object, the query and the path.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

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
