"""The configuration of a run, whatever its recipe: schema, composing, placement presets, checks."""
