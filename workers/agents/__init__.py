"""Policies that act over several turns: environments, tools, and the tokens between sampled turns.

environment       the interface of environments: `reset` and `step`, or only tools
load_environment  loads the configured classes, agents and tools
process           the program that loads an environment's code and plays its trajectories
adapters          environments of other packages, chosen by a prefix
calls             parses tool calls in a policy's text
gateway           the HTTP server through which an agent calls the policy
router            the address at which agents on other machines reach a trajectory
requests          an agent's request and the response, in the form of chat completions
dialects          Anthropic's Messages and OpenAI's Responses, as chat completions
chat              the tokens between two sampled turns
host              the processes of environments, and communication with them
trajectory        the state of one trajectory
players           plays the trajectories of a rollout worker
"""

from workers.agents.environment import Environment, EnvironmentAdapter, Observation, TrajectoryEnd

__all__ = ["EnvironmentAdapter", "TrajectoryEnd", "Environment", "Observation"]
