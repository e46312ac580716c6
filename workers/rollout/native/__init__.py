"""The embedded rollout engine: a decode loop with a KV cache of its own."""
