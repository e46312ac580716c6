"""The embedded rollout engine: a decode loop with its own KV cache."""
