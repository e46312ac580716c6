"""Determine how models of a class may run; each answer is proven on a small model of the class."""
