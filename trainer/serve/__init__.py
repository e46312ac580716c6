"""A server of the Tinker protocol: clients have data, loss and loop, the server has the weights."""
