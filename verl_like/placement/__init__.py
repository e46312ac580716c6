"""Where roles run: pools of devices, and the plan of roles on pools, checked before a device is taken."""
