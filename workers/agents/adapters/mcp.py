"""`environment=mcp:COMMAND` gives the policy the tools of an MCP server, which the command starts.

Each trajectory has its own server, which communicates by lines of JSON-RPC over its standard input
and output. The first response without a tool call ends the trajectory.
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
from workers.agents.environment import EnvironmentAdapter, Tool

VERSION = "2025-06-18"
"""The protocol version that is requested; a server replies with a version that it supports."""


class MCP(EnvironmentAdapter):
    """Offers the server's tools to the policy."""

    @classmethod
    def id_in_full(cls, name: str) -> str:
        """Make file names in the command absolute, because servers start in another folder."""
        words = shlex.split(name)
        return shlex.join(
            str(Path(word).absolute()) if Path(word).is_file() else word for word in words
        )

    @classmethod
    def prepare(cls) -> None:
        """Start a server once, and request its tools."""
        try:
            listed = Server(cls.id).tools()
        except (OSError, ValueError, LookupError, RuntimeError) as error:
            raise ConfigError(
                f"environment=mcp:{cls.id}: the MCP server did not list its tools: {error}"
            ) from error
        cls.tools = tuple(
            Tool(
                tool["name"],
                tool.get("description") or tool["name"],
                tool["inputSchema"],
                partial(_call, tool["name"]),
                is_method=True,
            )
            for tool in listed
        )

    def reset(self, row: Mapping[str, Any], rng: Any) -> None:
        """Start the trajectory's server; nothing is added to the row's prompt."""
        self._server = Server(self.id)


def _call(name: str, environment: MCP, **arguments: Any) -> str:
    result = environment._server.ask("tools/call", {"name": name, "arguments": arguments})
    texts = [c["text"] for c in result.get("content", ()) if c.get("type") == "text"]
    reply = "\n".join(texts) or json.dumps(result.get("structuredContent"))
    if result.get("isError"):
        raise RuntimeError(reply)
    return reply


class Server:
    """An MCP server's process."""

    def __init__(self, command: str) -> None:
        """Start the process, and negotiate the protocol."""
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        weakref.finalize(self, _end, self._process)
        self._number = 0
        client = {"name": "verl-like", "version": "1"}
        params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client}
        self.ask("initialize", params)
        self._send({"method": "notifications/initialized"})

    def ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its result; reject requests that the server sends meanwhile."""
        self._number += 1
        with suppress(BrokenPipeError):  # the server has ended, which the loop below reports
            self._send({"id": self._number, "method": method, "params": params})
        assert self._process.stdout is not None, "the process has a pipe"
        for line in self._process.stdout:
            answer = json.loads(line)
            if "method" in answer and "id" in answer:
                refusal = {"code": -32601, "message": "this client supports no requests"}
                self._send({"id": answer["id"], "error": refusal})
            elif answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error'].get('message', answer)}")
                result: dict[str, Any] = answer["result"]
                return result
        raise RuntimeError(f"the server exited without answering {method}")

    def tools(self) -> list[dict[str, Any]]:
        """Return all tools of the server, whose list may have several pages."""
        listed: list[dict[str, Any]] = []
        cursor: dict[str, Any] | None = {}
        while cursor is not None:
            page = self.ask("tools/list", cursor)
            listed += page["tools"]
            cursor = {"cursor": page["nextCursor"]} if page.get("nextCursor") else None
        return listed

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None, "the process has a pipe"
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
