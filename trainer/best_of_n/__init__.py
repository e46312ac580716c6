"""Best of n (rejection sampling): responses of a model, scored, and the best kept in a file."""
