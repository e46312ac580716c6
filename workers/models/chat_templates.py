"""Chat templates of strangers: what they make is bounded, in size and in time, whenever they run.

transformers compiles a tokenizer's template in jinja2's sandbox, which keeps it from files and
Python, not from a text of 4 GB. `bound_templates()` puts a sandbox in its place that counts the
characters and places which a rendering makes, before an operation makes them where it may make
many of few.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST = 2**26
"""Characters, and bytes of lists, that all operations of one rendering may make together."""
WIDEST = 10_000
"""The largest number that an operation of `PADDING` is given."""
LONGEST_NUMBER = 2**14
"""Bits of a whole number that is made of others."""
PADDING = {
    *("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice"),
    *("tojson", "to_bytes", "truncate"),
}
REFUSED = {"translate", "lipsum", "pprint", "urlize", "xmlattr"}
"""What no chat needs, and may make much of little."""
MAY_BE_LARGE = {*PADDING, *REFUSED, "join", "sum", "replace", "format", "format_map"}
"""Methods and filters that may make much of little; others make about what they are given."""
LONG_NUMBER = re.compile(r"\d{5}|\*|\{[^{}]*\{")
"""In a text that is formatted: a width, or one that is taken from an argument."""
SECONDS = 10.0
"""In which a template has written a chat."""


class TooMuchError(SecurityError):
    """A rendering that passes its bounds."""


class NoEndError(TooMuchError):
    """One that takes longer than `SECONDS`."""


class _Renderings(threading.local):
    """What the rendering of this thread has left to make."""

    left = MOST


_renderings = _Renderings()


def charge(size: int) -> None:
    """Count so many characters or places; refuse what is beyond `MOST`."""
    _renderings.left -= size
    if _renderings.left < 0:
        raise TooMuchError(f"it makes texts and lists of more than {MOST:,} characters")


def size_of(value: Any) -> int:
    """Characters of a text; the bytes of a list's places, and what its items have."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        inner = sum(len(one) for one in value if isinstance(one, str | list | tuple))
        return 8 * len(value) + inner
    return 0


def charge_before(name: str, arguments: list[Any]) -> None:
    """Count what a function or filter of this name will make of few arguments, or refuse it."""
    texts = [each for each in arguments if isinstance(each, str)]
    if name in REFUSED:
        raise TooMuchError(f"{name} is not for chats")
    if name in PADDING:
        numbers = [each for each in arguments if isinstance(each, int)]
        if any(number > WIDEST for number in numbers) or sum(map(len, texts[1:])) > WIDEST:
            raise TooMuchError(f"{name} is given more than {WIDEST:,}")
        lines = texts[0].count("\n") + 1 if texts else 1
        charge(lines * (max(numbers, default=0) + sum(map(len, texts[1:]))))
    if name == "replace" and len(texts) >= 3:
        charge(texts[0].count(texts[1]) * len(texts[2]))
    if name in ("format", "format_map") and texts:
        charge_format(texts[0], arguments[1:])


def charge_format(text: str, arguments: Any) -> None:
    """As `charge_before`, of what is written into the places of a text."""
    if LONG_NUMBER.search(text):
        raise TooMuchError("a text is formatted with a width of five digits or from elsewhere")
    charge((text.count("%") + text.count("{")) * (size_of(arguments) + 1))


def joined(parts: Iterable[Any], between: str = "") -> str:
    """The texts in one, each counted before they are."""
    texts, made = [], 0
    for part in parts:
        text = str(part)
        made += len(text) + len(between) + 1
        if made > MOST:
            break
        texts.append(text)
    charge(made)
    return between.join(texts)


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is counted, where it may be large before it is there."""

    @functools.wraps(function)
    def filtered_plainly(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        charge(size_of(result))
        return result

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if name in ("join", "sum"):  # of parts that a template may have made without an end
            place = 1 if hasattr(function, "jinja_pass_arg") else 0
            given[place] = parts = list(given[place])
            between = next((each for each in args[place + 1 :] if isinstance(each, str)), "")
            charge(sum(size_of(part) + 1 for part in parts) + len(between) * len(parts))
        charge_before(name, [*given, *kwargs.values()])
        result = function(*given, **kwargs)
        charge(size_of(result))
        return result

    return filtered if name in MAY_BE_LARGE else filtered_plainly


class _Generator(CodeGenerator):
    """Compiles `~` as a call of `joined`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Watch:
    """Ends renderings that take too long: one thread for all, while there are any."""

    def __init__(self) -> None:
        self._lock, self._began = threading.Lock(), dict[int, float]()
        self._is_looking = False

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Within, this thread renders."""
        thread = threading.get_ident()
        with self._lock:
            self._began[thread] = time.monotonic()
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._look, name="chat templates", daemon=True).start()
        try:
            yield
        except NoEndError:
            raise NoEndError(f"it has not written a chat in {SECONDS:g} s") from None
        finally:
            with self._lock:
                self._began.pop(thread, None)

    def _look(self) -> None:
        end_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        while True:
            time.sleep(min(1.0, SECONDS / 2))
            with self._lock:
                if not self._began:
                    self._is_looking = False
                    return
                for thread, began in list(self._began.items()):
                    if time.monotonic() - began > SECONDS:
                        end_in(ctypes.c_ulong(thread), ctypes.py_object(NoEndError))
                        del self._began[thread]


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.__init__)  # type: ignore[misc]


class _Template(Template):
    """Each rendering has its own bounds."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        _renderings.left = MOST
        with _watch.rendering():
            return super().render(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        """As `render`, piece by piece: with `{% generation %}`."""
        _renderings.left = MOST
        with _watch.rendering():
            for part in super().generate(*args, **kwargs):
                charge(len(part) + 1)
                yield part


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, whose operations are counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Generator
    template_class = _Template
    concat = staticmethod(joined)

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        """Compile, with the filters that are there by now."""
        self.filters = {name: counted(name, each) for name, each in self.filters.items()}
        self.globals.pop("lipsum", None)
        return super().from_string(source, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Count what comes of it first."""
        if operator == "+" and isinstance(left, str):  # the most frequent
            made: Any = left + right
            charge(len(made))
            return made
        if operator == "%" and isinstance(left, str | bytes):
            charge_format(str(left), right)
        elif isinstance(left, int) and isinstance(right, int):
            times = right if operator == "**" else 1
            if left.bit_length() * times + right.bit_length() > LONGEST_NUMBER:
                raise TooMuchError(f"it makes numbers of more than {LONGEST_NUMBER:,} bits")
        elif operator == "*":
            many, times = (right, left) if isinstance(left, int) else (left, right)
            charge(size_of(many) * max(times, 0) if isinstance(times, int) else 0)
        else:
            charge(size_of(left) + size_of(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Count what comes of it, first where it may be much."""
        name = getattr(called, "__name__", "")
        method = getattr(called, "__wrapped__", called)  # jinja2 wraps `format`
        owner = getattr(method, "__self__", None)
        if name == "join" and isinstance(owner, str) and args:
            return joined(args[0], owner)
        if name in MAY_BE_LARGE:
            charge_before(name, [owner, *args, *kwargs.values()])
        result = super().call(context, called, *args, **kwargs)
        charge(size_of(result))
        return result


def bound_templates() -> None:
    """From now on templates are compiled for the sandbox above."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox
