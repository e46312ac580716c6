"""Policies that act in several turns: environments and tools, and what is drawn between them.

environment   the contract: `reset` and `step`, or tools alone
adapters      environments of other packages, by prefix
tools         a function's schema, and answers to calls
calls         the calls in what a policy says
chat          what stands between two drawn turns, as token ids
host          processes of environments, and how they are asked
loop          turns of many trajectories beside one engine
"""

from workers.agents.environment import Adapter, End, Environment, Turn

__all__ = ["Adapter", "End", "Environment", "Turn"]
