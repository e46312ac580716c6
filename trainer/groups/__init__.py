"""Start worker groups from a placement."""
