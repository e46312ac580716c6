"""A server for the Tinker protocol: it has the weights; clients have the data, loss and loop."""
