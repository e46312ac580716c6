"""Classes and functions that exist only for code that was written for verl."""
