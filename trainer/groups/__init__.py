"""From a placement to running worker groups."""
