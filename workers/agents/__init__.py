"""Policies that act over several turns: environments, tools, and the tokens between sampled turns.

environment       the interface of environments: `reset` and `step`, or only tools
load_environment  loads the configured classes, agents and tools
episode           one trajectory of an environment, in the process that runs it
adapters          environments of other packages, chosen by a prefix
tools             the schema of a function, and replies to tool calls
calls             parses tool calls in a policy's text
gateway           the HTTP server through which an agent calls the policy
requests          an agent's request and the response, in the form of chat completions
template          the text that a chat template writes around a turn
chat              the tokens between two sampled turns
host              the processes of environments, and communication with them
trajectory        the state of one trajectory
loop              plays many trajectories with one engine
players           plays the trajectories of a rollout worker
"""

from workers.agents.environment import Environment, EnvironmentAdapter, Observation, TrajectoryEnd

__all__ = ["EnvironmentAdapter", "TrajectoryEnd", "Environment", "Observation"]
