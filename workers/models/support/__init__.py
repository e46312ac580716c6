"""How models of a class may run, each answer proven on a small model of the class."""
