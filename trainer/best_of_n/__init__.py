"""Best of n (rejection sampling): sample responses, score them, and save the best ones."""
