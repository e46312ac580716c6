"""`verl-like replay`: repeat a step or a stage of a run from what the run saved."""
