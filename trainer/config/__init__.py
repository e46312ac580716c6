"""The configuration of a run of any recipe: schema, composition, placement presets, checks."""
