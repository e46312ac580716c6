"""Where roles run: roles and their aliases, pools of devices, and the plan that joins them."""
