"""The workers of the built-in roles: actor, critic, reference, reward model, teacher, rollout."""
