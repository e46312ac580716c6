"""`verl-like replay`: a step or a stage of a run, made again from what the run kept."""
