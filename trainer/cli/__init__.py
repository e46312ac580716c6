"""The console command `verl-like` and its subcommands."""
