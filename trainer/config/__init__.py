"""The configuration of a run: its schema, how it is composed from YAML and overrides, and what is checked."""
