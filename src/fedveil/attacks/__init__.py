"""Attacks: the matching engine with its choices, and one module per named attack."""
