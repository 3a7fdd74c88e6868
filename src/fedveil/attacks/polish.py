"""The end of a matching attack: from about right to exact, where the model is smooth and nothing hides the update."""

from __future__ import annotations

from fedveil.attacks.optimizers import LBFGS
from fedveil.attacks.priors import Outside, TotalVariation
from fedveil.attacks.recipe import Phase

# Under noise a close fit is a fit to the noise. An update of many more entries than inputs can be matched this closely,
# as a share of its squares, only if hardly anything was added to it; else what the phase before found is kept.
EXPLAINED = 0.01
PATIENCE = 2  # steps of 20 inner ones all through which nothing changes: a victim's polish is over
# Of costs: near a match, and on trained models from the start, slopes are so small that L-BFGS, which takes curvatures
# below 1e-10 for none, would stay where it is. On LeNet after a round of training it then gets 9 dB, scaled 61.
STEEPER = 1e4
OUTSIDE = 0.1  # weight of the valid range, in which L-BFGS cannot be held by clamping


def polishing(steps: int, *, reweighs: bool = False) -> Phase:
    """So many steps of L-BFGS on the squared distance, within the valid range.

    reweighs: first trust every entry anew. The fit to trusted entries says nothing of noise, so it is always kept.
    """
    return Phase(
        steps,
        LBFGS(scale=STEEPER, patience=PATIENCE),
        match="relative-l2",
        priors=(Outside(OUTSIDE),),
        accepts=None if reweighs else EXPLAINED,
        reweighs=reweighs,
    )


# Beside half the squared distance in standard deviations of the noise, as a mean over inputs. On digits anything from
# a third to one and a half times as much total variation is within 1 dB.
SMOOTH, WITHIN = 0.7, 30.0
LIKELIEST_STEPS = 10  # of L-BFGS to the likeliest picture: more change little


def by_noise(steps: int) -> Phase:
    """So many steps of L-BFGS to the likeliest picture, given noise of a known law and that pictures are smooth.

    With noise of a tenth of the update's squares, on single digits and LeNet, it gets 23 dB, where Adam on the cosine
    with the best weight of total variation gets 14.
    """
    return Phase(steps, LBFGS(patience=PATIENCE), match="l2", priors=(Outside(WITHIN), TotalVariation(SMOOTH)))
