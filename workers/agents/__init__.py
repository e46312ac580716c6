"""Policies that act over several turns: environments, tools, and the tokens between sampled turns.

environment   the interface of environments: `reset` and `step`, or only tools
adapters      environments of other packages, chosen by a prefix
tools         the schema of a function, and replies to tool calls
calls         parses tool calls in a policy's text
chat          the tokens between two sampled turns
host          the processes of environments, and communication with them
loop          plays many trajectories with one engine
"""

from workers.agents.environment import Environment, EnvironmentAdapter, TrajectoryEnd, Turn

__all__ = ["EnvironmentAdapter", "TrajectoryEnd", "Environment", "Turn"]
