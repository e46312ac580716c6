"""Where worker processes come from: `local` starts them here, `ray` on a cluster."""
