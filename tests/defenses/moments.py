"""Moments of samples against closed forms."""


def assert_variance(sample, variance):
    """The sample's variance is the given one, within 4.5 standard errors by its own fourth moment."""
    centered = sample.double() - sample.double().mean()
    spread = ((centered**4).mean() - variance**2).clamp_min(0).sqrt()
    tolerance = max(4.5 * float(spread) / len(sample) ** 0.5, 1e-3 * variance)
    assert abs(float(centered.square().mean()) - variance) < tolerance
