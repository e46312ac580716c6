"""Damage of a file in a run folder: missing, truncated, of another run, or foreign."""

from __future__ import annotations

NO_OBJECTS: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"step": 1, "tra',
    "zeros": bytes(64),
    "no UTF-8": b'{"step": "\xff\xfe"}',
    "a null": b"null",
    "a number": b"3",
    "a list": b"[]",
    "a list of lists": b"[[1]]",
    "a text": b'"x"',
    "a nest": b"[" * 100_000,
    "a nest of objects": b'{"a":' * 100_000,
    "a huge number": b'{"step": 1' + b"0" * 5000 + b"}",
}
"""Contents that are no JSON object of ours."""

OTHER_OBJECTS: dict[str, bytes] = {
    "an empty object": b"{}",
    "a step that is a text": b'{"step": "x", "files": {}, "config": {}, "traceEvents": "x"}',
    "a step that is nothing": b'{"step": null, "files": null, "traceEvents": null}',
    "a step that is no number": b'{"step": NaN, "files": {}, "traceEvents": [1]}',
    "an endless step": b'{"step": Infinity, "files": [], "traceEvents": [{}]}',
    "files that are numbers": b'{"step": 1, "files": {"a": 1}, "traceEvents": [{"name": 1}]}',
    "files elsewhere": b'{"step": 1, "files": {"../a": {"bytes": 0, "crc32": 0}}, "config": {}}',
    "no config": b'{"step": 1, "files": {}, "config": 3, "traceEvents": {"a": 1}}',
    "an event of texts": b'{"traceEvents": [{"name": "process_name", "args": {"name": 1}}]}',
    "an event of lists": b'{"traceEvents": [{"name": "thread_name", "pid": [], "args": []}]}',
    "a validation of texts": b'{"step": 1, "val-core/a": "x", "traceEvents": 1}',
    "a validation in a list": b'["val-core/a"]',
    "a call of texts": b'{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "cat": 3}],'
    b' "otherData": {"stages": []}}',
}
"""Objects that no run writes."""

ANY_STATE = NO_OBJECTS | OTHER_OBJECTS
