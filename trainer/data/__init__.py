"""Read prompts, texts and preference pairs from files, and make batches of them."""
