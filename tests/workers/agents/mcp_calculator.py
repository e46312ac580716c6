"""An MCP server with two tools, as the package `mcp` writes one."""

# mypy: ignore-errors

from mcp.server import MCPServer

server = MCPServer("calculator", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def divide(a: float, b: float) -> float:
    """The quotient."""
    return a / b


if __name__ == "__main__":
    server.run()
