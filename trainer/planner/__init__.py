"""Which role on which cards, how many, and how long a step takes: said before a card is rented."""
