"""Makers that sample and trainers that learn, each at its own pace: the detached recipe."""
