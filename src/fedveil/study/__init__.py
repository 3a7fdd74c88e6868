"""Grids of experiments over one store: comparisons of defenses, and the tables of papers."""
