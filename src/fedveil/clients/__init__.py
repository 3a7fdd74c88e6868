"""One step of many clients at once: the leading axis, and the one place that computes gradients on it."""
