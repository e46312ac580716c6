"""`mcp:COMMAND` gives the policy the tools of an MCP server that the command starts.

Each trajectory has a server of its own, asked by lines of JSON-RPC over its input and output; the
first answer without a call ends the trajectory.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from workers.agents.environment import Adapter
from workers.agents.tools import Tool

VERSION = "2025-06-18"
"""Of the protocol; a server answers with one that it knows."""


class MCP(Adapter):
    """A client of one server."""

    @classmethod
    def id_in_full(cls, name: str) -> str:
        """Words that are files of this folder in full: servers are started in another one."""
        words = shlex.split(name)
        return shlex.join(
            str(Path(word).absolute()) if Path(word).is_file() else word for word in words
        )

    @classmethod
    def prepare(cls) -> None:
        """Ask a server for its tools."""
        try:
            listed = Server(cls.id).tools()
        except (OSError, ValueError, LookupError, RuntimeError) as error:
            raise ConfigError(
                f"environment=mcp:{cls.id}: no MCP server answers over its output: {error}"
            ) from error
        cls.tools = tuple(
            Tool(
                one["name"],
                one.get("description") or one["name"],
                one["inputSchema"],
                partial(_call, one["name"]),
                is_method=True,
            )
            for one in listed
        )

    def reset(self, row: Mapping[str, Any], rng: Any) -> None:
        """Start the trajectory's server; the row's prompt is all there is to read."""
        self._server = Server(self.id)


def _call(name: str, environment: MCP, **arguments: Any) -> str:
    found = environment._server.ask("tools/call", {"name": name, "arguments": arguments})
    texts = [one["text"] for one in found.get("content", ()) if one.get("type") == "text"]
    said = "\n".join(texts) or json.dumps(found.get("structuredContent"))
    if found.get("isError"):
        raise RuntimeError(said)
    return said


class Server:
    """An MCP server's process."""

    def __init__(self, command: str) -> None:
        """Starts it, and agrees on the protocol."""
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        weakref.finalize(self, _end, self._process)
        self._number = 0
        client = {"name": "verl-like", "version": "1"}
        about = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client}
        self.ask("initialize", about)
        self._send({"method": "notifications/initialized"})

    def ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request; what the server asks meanwhile is answered by a refusal."""
        self._number += 1
        with suppress(BrokenPipeError):  # it has ended: there is no line to read then
            self._send({"id": self._number, "method": method, "params": params})
        assert self._process.stdout is not None, "it was asked for"
        for line in self._process.stdout:
            answer = json.loads(line)
            if "method" in answer and "id" in answer:
                refusal = {"code": -32601, "message": "this client offers nothing"}
                self._send({"id": answer["id"], "error": refusal})
            elif answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error'].get('message', answer)}")
                found: dict[str, Any] = answer["result"]
                return found
        raise RuntimeError(f"the server has ended without an answer to {method}")

    def tools(self) -> list[dict[str, Any]]:
        """All pages of its list."""
        listed: list[dict[str, Any]] = []
        asked: dict[str, Any] | None = {}
        while asked is not None:
            page = self.ask("tools/list", asked)
            listed += page["tools"]
            asked = {"cursor": page["nextCursor"]} if page.get("nextCursor") else None
        return listed

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
