"""The backends that start worker processes: `local` on this machine, `ray` on a cluster."""
