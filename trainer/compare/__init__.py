"""Several runs side by side: what was set, what came out, where the time went."""
