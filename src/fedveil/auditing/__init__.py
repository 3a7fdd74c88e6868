"""Audits: train under a defense, attack what was shared, score it, judge it."""
