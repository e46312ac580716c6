"""Rewards: built-in rules and your functions, the processes that run them, and reward servers."""
