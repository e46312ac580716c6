"""verl's keys on the command line of `ppo`: which are ours renamed, and which change nothing."""
