"""Policies that act over several turns: environments, tools, and the tokens between sampled turns.

environment   the contract: `reset` and `step`, or only tools
adapters      environments of other packages, by prefix
tools         the schema of a function, and replies to calls
calls         parsing of the calls in a policy's text
chat          the tokens between two sampled turns
host          processes of environments, and communication with them
loop          turns of many trajectories next to one engine
"""

from workers.agents.environment import Environment, EnvironmentAdapter, TrajectoryEnd, Turn

__all__ = ["EnvironmentAdapter", "TrajectoryEnd", "Environment", "Turn"]
