"""Defenses: one module per method. The classes are reached by name through the registry, or as `fedveil.NAME`."""
