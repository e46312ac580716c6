"""Forward and backward passes over rows: layout, packing, attention, the token head."""
