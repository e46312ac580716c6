"""Rule rewards: the functions, and the processes that run them."""
