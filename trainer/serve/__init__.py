"""A server of the Tinker protocol: clients own data, loss and loop, worker groups the weights."""
