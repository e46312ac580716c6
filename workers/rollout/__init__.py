"""Rollout engines: one interface, and the engines hf, native and vllm."""
