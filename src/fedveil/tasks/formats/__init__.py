"""Readers of data files. Each is strict and never runs what it reads."""
