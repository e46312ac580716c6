"""Compare several runs: settings, results, and times."""
