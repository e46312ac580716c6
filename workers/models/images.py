"""The images of a model: their tokens and tensors, by its processor, and the images of a pass.

    reader = image_reader(folder)
    text = reader.expanded(text, refs)      # the tokens of every image in its place
    inputs = reader.inputs(refs)            # pixel_values and others, as one batch

A batch has references to images (`workers.images`) instead of pixels. Each process opens and
processes the images of its own rows, once while they stay in its cache.

The image processor of the model's folder runs on one backend (`IMAGE_BACKEND`) in every process.
Its backends compute different pixels, so trainer and rollout would otherwise see different images.

    numbers = images.of_row(ids, refs, name)                # when a row arrives, per token
    inputs |= images.arguments(inputs, numbers, device)     # before a pass over some of the tokens

The numbers of a token are 1 + the number of its image (0: text) and, for classes whose positions
have three axes (Qwen-VL), its positions. They are cut, ordered and packed like the tokens, and each
pass gets the pixels of the images whose tokens it has.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import ConfigError
from verl_like.process.machine import usable_cores
from workers.config.model import IMAGE_BACKEND
from workers.images import ImageRef, open_image
from workers.models.causal_lm import body_of
from workers.models.support import Support

MAX_THREADS = 16
"""Threads of a process that process images; a group of them may exceed the cache for a moment."""
CACHE_BYTES = 2 * 2**30
"""Processed images that a process keeps."""


def has_vision(config: Any) -> bool:
    """Return whether models with this config read images."""
    return getattr(config, "vision_config", None) is not None


def why_no_images(config: Any) -> str:
    """Return why models with this config do not run on rows with images; "" if they do."""
    if not has_vision(config):
        return f"model type {config.model_type!r} does not read images"
    support = Support.of(config, "sdpa")
    if not support.why_not("images"):
        return ""
    return (
        f"rows with images were not proved to be right for {support.name}, so its "
        "log-probs could be those of another model"
    )


class ImageLayout(NamedTuple):
    """The tokens of every image of one size."""

    text: str
    num_tokens: int
    """Number of tokens at which the model reads features of the image."""
    grids: dict[str, Tensor]
    """The tensors that positions depend on."""


@cache
def image_reader(folder: str) -> ImageReader:
    """Return the reader of the model in this folder, one per process.

    A ConfigError says why the model does not run on rows with images.
    """
    from transformers import AutoConfig

    reason = why_no_images(AutoConfig.from_pretrained(folder))
    if reason:
        raise ConfigError(
            f"the model {folder}: {reason}. Leave the images out, or use a vision-language model "
            "that docs/vision.md lists."
        )
    return ImageReader(folder)


def with_image_tokens(tokenizer: Any, text: str, refs: Sequence[Sequence[Any]]) -> str:
    """Return a text that a chat template has written, with the tokens of its images."""
    reader = image_reader(tokenizer.name_or_path)
    return reader.expanded(text, [ImageRef(*ref) for ref in refs])


class ImageReader:
    """Turns images into tokens and tensors, with the processor of a model's folder."""

    def __init__(self, folder: str) -> None:
        """Load the image processor and the tokenizer; a ConfigError says what is missing."""
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(folder)
        self.token_id = image_token_id(config)
        others = (getattr(config, f"{kind}_token_id", None) for kind in ("video", "audio"))
        self.stop_ids = (self.token_id, *(other for other in others if other is not None))
        """Tokens that a response cannot contain, because the model reads features there."""
        self.processor = _load_processor(
            folder, config.model_type, AutoTokenizer.from_pretrained(folder)
        )
        self._token: str = self.processor.tokenizer.convert_ids_to_tokens(self.token_id)
        self.refs: list[ImageRef] = []
        """The images that passes of this process name by their number here."""
        self._numbers: dict[ImageRef, int] = {}
        self._inputs: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._layouts: dict[tuple[int, int], ImageLayout] = {}
        self._settings = self.processor._merge_kwargs(
            self.processor.valid_processor_kwargs,
            tokenizer_init_kwargs=self.processor.tokenizer.init_kwargs,
            return_tensors="pt",
        )["images_kwargs"]

    @property
    def placeholder(self) -> str:
        """The text that stands for an image in a prompt."""
        token: str = self.processor.image_token
        return token

    def expanded(self, text: str, refs: Sequence[ImageRef]) -> str:
        """Return the text with the tokens of every image in the place of its placeholder.

        A ValueError says that there are more or fewer placeholders than images.
        """
        count = text.count(self.placeholder)
        if count != len(refs):
            raise ValueError(f"it has {len(refs)} images and {count} places for them")
        if not refs:
            return text
        tokens = [self._text_of(ref) for ref in refs]
        (result,), _ = self.processor.get_text_with_replacements([text], tokens)
        return str(result)

    def _text_of(self, ref: ImageRef) -> str:
        """Return the text that expands to the tokens of an image."""
        size = ref.width, ref.height
        if size in self._layouts or not self._counts_tokens:
            return self._layout_of(ref).text
        (count,) = self.processor._get_num_multimodal_tokens([size[::-1]]).num_image_tokens
        return self._token * int(count)

    @cached_property
    def _counts_tokens(self) -> bool:
        """True if images have only feature tokens, which the processor counts without pixels."""
        has_others = self._layout_of(ImageRef("", "", 64, 64)).text.replace(self._token, "")
        return not has_others and hasattr(self.processor, "_get_num_multimodal_tokens")

    def _layout_of(self, ref: ImageRef) -> ImageLayout:
        """Return the tokens of an image, which depend only on its size."""
        size = ref.width, ref.height
        if size not in self._layouts:
            from PIL import Image

            # the values of the pixels do not matter, so they are not computed
            blank = Image.new("RGB", size)
            self._process(blank, resample=0, do_rescale=False, do_normalize=False)
        return self._layouts[size]

    def _process(self, image: Any, **settings: Any) -> dict[str, Tensor]:
        """Return the tensors of an image, and note the layout of its size."""
        processor = self.processor
        processed, (text,) = processor._process_images([[image]], **(self._settings | settings))
        unused = {*processor.unused_input_names, "num_patches", "rows", "cols"}
        inputs = {name: torch.as_tensor(v) for name, v in processed.items() if name not in unused}
        if "pixel_attention_mask" in inputs:  # [1, tiles, ...] becomes [tiles, 1, ...]
            inputs = {name: tensor.transpose(0, 1) for name, tensor in inputs.items()}
        if image.size not in self._layouts:
            grids = {name: tensor for name, tensor in inputs.items() if name.endswith("_thw")}
            self._layouts[image.size] = ImageLayout(text, text.count(self._token), grids)
        return inputs

    def collapsed(self, ids: Sequence[int], refs: Sequence[ImageRef]) -> list[int]:
        """Return the ids with one placeholder per image, which other programs expand.

        A ValueError says that an image's tokens are not there.
        """
        placeholder = self.processor.tokenizer.convert_tokens_to_ids(self.placeholder)
        collapsed: list[int] = []
        rest = list(ids)
        for number, ref in enumerate(refs, start=1):
            tokens = self.ids_of(ref)
            starts = (n for n, token in enumerate(rest) if token == tokens[0])
            start = next((n for n in starts if rest[n : n + len(tokens)] == tokens), None)
            if start is None:
                raise ValueError(f"the {len(tokens)} tokens of image {number} are missing")
            collapsed += [*rest[:start], placeholder]
            rest = rest[start + len(tokens) :]
        return collapsed + rest

    def ids_of(self, ref: ImageRef) -> list[int]:
        """Return the token ids of an image."""
        ids = self.processor.tokenizer(self._text_of(ref), add_special_tokens=False)["input_ids"]
        return list(ids)

    def num_tokens(self, ref: ImageRef) -> int:
        """Return the number of tokens at which the model reads features of the image."""
        return self._layout_of(ref).num_tokens

    def load(self, rows: Iterable[tuple[Sequence[Any], str]]) -> None:
        """Process the images of rows in threads, as long as the cache has room for them.

        A row has references to images, and a name for messages.
        """
        named = ((ImageRef(*ref), name) for refs, name in rows for ref in refs)
        distinct = {ref.sha: (ref, name) for ref, name in named}
        missing = [image for sha, image in distinct.items() if sha not in self._inputs]
        if not missing:
            return
        added, num_threads = 0, min(usable_cores(), MAX_THREADS)
        with ThreadPoolExecutor(num_threads) as threads:
            for start in range(0, len(missing), 2 * num_threads):
                group = missing[start : start + 2 * num_threads]
                processed = threads.map(self._opened, *zip(*group, strict=True))
                for (ref, _), inputs in zip(group, processed, strict=True):
                    self._inputs[ref.sha] = inputs
                    added += _num_bytes(inputs)
                if added > CACHE_BYTES:
                    break
        self._shrink()

    def _opened(self, ref: ImageRef, row: str = "") -> dict[str, Tensor]:
        return self._process(open_image(ref, row))

    def _shrink(self) -> None:
        """Remove the images that were used first from a cache that is too large."""
        size = sum(map(_num_bytes, self._inputs.values()))
        while size > CACHE_BYTES and len(self._inputs) > 1:
            size -= _num_bytes(self._inputs.popitem(last=False)[1])

    def inputs(self, refs: Sequence[ImageRef]) -> dict[str, Tensor]:
        """Return the tensors of the images as one batch, in order."""
        parts = []
        for ref in refs:
            if ref.sha not in self._inputs:
                self._inputs[ref.sha] = self._opened(ref)
            self._inputs.move_to_end(ref.sha)
            parts.append(self._inputs[ref.sha])
        self._shrink()
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    def grids(self, refs: Sequence[ImageRef]) -> dict[str, Tensor]:
        """Return those of the images' tensors that positions depend on."""
        parts = [self._layout_of(ref).grids for ref in refs]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def places(self, ids: Tensor, refs: Sequence[ImageRef], name: str) -> Tensor:
        """Return 1 + the number of the image that each token of a row belongs to, 0 for text.

        Tokens that the policy samples end a response, so the first ones in a row are the images'.
        """
        counts = [self.num_tokens(ref) for ref in refs]
        positions = (ids == self.token_id).nonzero().squeeze(1)
        if len(positions) < sum(counts):
            raise ConfigError(
                f"{name} has {len(positions)} image tokens, but its {len(refs)} images need "
                f"{sum(counts)}. Do not truncate prompts with images (data.truncation)."
            )
        numbers = torch.tensor([1 + self._number(ref) for ref in refs], dtype=torch.int64)
        places = torch.zeros_like(ids)
        places[positions[: sum(counts)]] = numbers.repeat_interleave(
            torch.tensor(counts, dtype=torch.int64)
        )
        return places

    def _number(self, ref: ImageRef) -> int:
        if ref not in self._numbers:
            self._numbers[ref] = len(self.refs)
            self.refs.append(ref)
        return self._numbers[ref]

    def ordered(self, places: Tensor) -> Tensor:
        """Return `places` with other numbers of the images, which are equal in every process."""
        present: list[int] = places[places > 0].unique().tolist()
        order = torch.zeros(len(self.refs) + 1, dtype=torch.int64)
        for rank, number in enumerate(sorted(present, key=lambda n: self.refs[n - 1]), start=1):
            order[number] = rank
        return order[places]

    def refs_at(self, places: Tensor) -> list[ImageRef]:
        """Return the images whose tokens are at these places, in order."""
        numbers: list[int] = places[places > 0].tolist()
        refs: list[ImageRef] = []
        done = 0
        while done < len(numbers):
            refs.append(self.refs[numbers[done] - 1])
            done += self.num_tokens(refs[-1])
        return refs


def image_token_id(config: Any) -> int:
    """Return the token at which a model with this config reads features of an image."""
    names = ("image_token_id", "image_token_index")
    ids = [getattr(config, name) for name in names if getattr(config, name, None) is not None]
    if not ids:
        raise ConfigError(f"models of type {config.model_type!r} have no image token.")
    token: int = ids[0]
    return token


def _num_bytes(inputs: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in inputs.values())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the images' tensors as one, padded with zeros where sizes differ."""
    sizes = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [size - length for size, length in zip(sizes, part.shape[1:], strict=True)]
        pad = [amount for size in reversed(missing) for amount in (0, size)]
        padded.append(torch.nn.functional.pad(part, pad) if any(missing) else part)
    return torch.cat(padded) if len(padded) > 1 else padded[0]


def contiguous(cls: Any) -> Any:
    """Return a subclass of a processor on PIL with the same pixels, computed three times as fast.

    Its two steps run over contiguous memory, if the class has those of transformers.
    """
    from transformers.image_processing_backends import PilBackend

    def rescale(_: Any, image: Any, scale: float, **__: Any) -> Any:
        rescaled = np.empty(image.shape, np.float32)
        return np.multiply(image, scale, out=rescaled, dtype=np.float64, casting="unsafe")

    def normalize(_: Any, image: Any, mean: Any, std: Any, **__: Any) -> Any:
        if not np.issubdtype(image.dtype, np.floating):
            image = image.astype(np.float32)
        mean, std = (np.array(values, image.dtype).reshape(-1, 1, 1) for values in (mean, std))
        image = image - mean
        return np.divide(image, std, out=image)

    steps = {step.__name__: step for step in (rescale, normalize)}
    theirs = {name for name in steps if getattr(cls, name, None) is getattr(PilBackend, name)}
    return type(cls.__name__, (cls,), {name: steps[name] for name in theirs})


def images_only(cls: Any) -> Any:
    """Return a subclass of a processor class of transformers whose other parts may be None."""

    def check(processor: Any, name: str, part: Any) -> Any:
        return part if part is None else cls.check_argument_for_proper_class(processor, name, part)

    return type(cls.__name__, (cls,), {"check_argument_for_proper_class": check})


def parts_of(cls: Any, image_processor: Any, tokenizer: Any) -> list[Any]:
    """Return the parts of a processor of this class, in its order; the others are None."""
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    return [parts.get(name) for name in cls.get_attributes()]


def _load_processor(folder: str, model_type: str, tokenizer: Any) -> Any:
    """Return the processor of transformers without its parts for videos and sound.

    They would need torchvision, which not every machine has.
    """
    import transformers
    from transformers.models.auto import processing_auto

    names: dict[str, str] = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    try:
        settings, _ = transformers.ProcessorMixin.get_processor_dict(folder)
        name = settings.get("processor_class") or names[model_type]
        cls = getattr(transformers, name)
        image_processor = transformers.AutoImageProcessor.from_pretrained(
            folder, backend=IMAGE_BACKEND
        )
        image_processor.__class__ = contiguous(type(image_processor))
        parts = parts_of(cls, image_processor, tokenizer)
        return images_only(cls).from_args_and_dict(parts, settings)
    except (ImportError, OSError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, ImportError) or "optional dependencies" in reason:
            raise ConfigError(
                f"the images of model type {model_type!r} need a package that is not installed: "
                "run `pip install torchvision num2words`, with the torchvision that belongs to "
                f"your torch ({reason:.200})."
            ) from error
        raise ConfigError(
            f"cannot load the image processor of the model {folder}: {error}. Copy "
            "preprocessor_config.json and processor_config.json from the base model."
        ) from error


TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments of `forward` that mark the tokens of images."""


class ImageInput:
    """The arguments of a model's passes over rows with images."""

    def __init__(self, module: Any, reader: ImageReader) -> None:
        """Look up which arguments the model's class takes."""
        self.reader = reader
        body = body_of(module)
        self.types = [name for name in TYPES if name in inspect.signature(body.forward).parameters]
        self.dtype: torch.dtype = body.dtype
        self.rope = next((part for part in body.modules() if hasattr(part, "get_rope_index")), None)
        """The module that computes positions on three axes, if the class has such positions."""
        both_ways = getattr(body.config.get_text_config(), "use_bidirectional_attention", None)
        self.looks_ahead = "token_type_ids" in self.types or both_ways == "vision"
        """True if the tokens of an image attend to later ones, so that rows cannot be packed."""

    def of_rows(
        self,
        columns: Mapping[str, RaggedTensor],
        images: Sequence[Sequence[Any]],
        names: Sequence[str],
    ) -> RaggedTensor:
        """Return the numbers of all tokens; `images` has the references of each row, or pair.

        `columns` has input_ids and position_ids. Where these begin at 0 again, a trajectory has a
        new segment, in which the positions of images begin at 0, too.
        """
        self.reader.load(zip((refs or () for refs in images), names, strict=True))
        ids = columns["input_ids"]
        sides = ids.lengths[0].numel() if len(ids) else 1
        numbers = [torch.zeros(0, 1 if self.rope is None else 4, dtype=torch.int64)]
        rows = zip(ids.flatten().rows(), columns["position_ids"].flatten().rows(), strict=True)
        for place, (row, positions) in enumerate(rows):
            images_of_row = images[place // sides] or ()
            of_row = self.of_row(row, images_of_row, names[place // sides])
            begins = (positions == 0).nonzero().squeeze(1)
            if len(begins) > 1:
                of_row[:, 1:] -= of_row[begins, 1:][(positions == 0).cumsum(0) - 1]
            numbers.append(of_row)
        return ids.with_values(torch.cat(numbers))

    def of_row(self, ids: Tensor, images: Sequence[Any], name: str) -> Tensor:
        """Return the numbers of a row's tokens, [tokens, 1 or 4]; errors call it `name`."""
        refs = [ImageRef(*ref) for ref in images]
        places = self.reader.places(ids, refs, name)
        if self.rope is None:
            return places[:, None]
        positions = torch.arange(len(ids)).expand(3, -1)
        if refs:
            grids = self.reader.grids(refs)
            types = (places > 0).int()[None]
            positions = self.rope.get_rope_index(ids[None], mm_token_type_ids=types, **grids)[0][
                :, 0
            ]
        return torch.cat([places[None], positions]).T

    def arguments(
        self, inputs: Mapping[str, Tensor], numbers: Tensor, device: torch.device
    ) -> dict[str, Tensor]:
        """Return the arguments of a pass over these tokens, in addition to or instead of `inputs`.

        `inputs` has input_ids and, if the pass gets positions, position_ids.
        """
        places, shape = numbers[:, 0], inputs["input_ids"].shape
        refs = self.reader.refs_at(places)
        added = self.reader.inputs(refs) if refs else {}
        added |= {name: (places > 0).long().view(shape) for name in self.types}
        for name, tensor in added.items():
            dtype = self.dtype if tensor.is_floating_point() else None
            added[name] = tensor.to(device, dtype)
        if self.rope is not None and "position_ids" in inputs:
            axes = numbers[:, 1:].T.reshape(3, *shape).to(device)
            added["position_ids"] = torch.cat([inputs["position_ids"][None], axes])
        return added

    def left_padded(
        self, inputs: Mapping[str, Tensor], *, numbers: Sequence[Tensor], shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the arguments of a pass over rows padded on the left to [rows, width].

        `numbers` has those of the first rows; the others are text.
        """
        padded = torch.zeros(*shape, numbers[0].shape[1], dtype=torch.int64)
        for row, of_row in zip(padded, numbers, strict=False):
            row[len(row) - len(of_row) :] = of_row
        return self.arguments(inputs, padded.flatten(0, 1), inputs["input_ids"].device)
