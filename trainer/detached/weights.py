"""Weights on their way from the trainers to the makers: published once, taken by each in its time.

`publish` is called between two updates and copies; `deliver` is called in a maker's thread and
sends that copy while the trainers go on.
"""

from __future__ import annotations
