"""Models, sharding and rollout engines, and the roles that stand on them; the order of calls is the trainer's."""
