"""Roles and their aliases, pools of devices, and the plan that assigns roles to pools and nodes."""
