"""Why a wait for samples ends without any: raised by `ExperienceBuffer.take`."""

from __future__ import annotations

from verl_like.errors import VerlLikeError


class StalledError(VerlLikeError, RuntimeError):
    """Makers and trainer wait for each other; the message says who waits for what."""


class EndOfSamples(Exception):
    """No maker has prompts left, and no batch can be filled."""


class ToldToStop(Exception):
    """The run is to stop, while a maker without which it gets no batch waited for a node."""
