"""The built-in roles: actor, critic, reference, reward model, rollout."""
