"""Data sets that are chosen by name: one module each, found by the registry without being imported."""
