"""A server for the Tinker protocol: clients have the data, loss and loop; it has the weights."""
