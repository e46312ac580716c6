"""Determine how models of a class may run; each answer is tested on a small model of the class."""
