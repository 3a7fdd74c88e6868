"""PNPM (Ren et al.): the sign mechanism whose range makes it unbiased."""

from __future__ import annotations

from fedveil.defenses.ldp import Epsilon
from fedveil.defenses.spm import SignMechanism
from fedveil.fields import declared
from fedveil.registry import defenses


@defenses.register("pnpm")
@declared
class PNPM(SignMechanism):
    """Flip each sign with probability 1/(e^ε+1) and multiply each size by a factor from U[1, C] with a wider C.

    C = (e^ε+3)/(e^ε−1) makes the mean of an entry its true value; the variance is |ω|²·4(e^ε+1/3)/(e^ε−1)². Our
    reading: SPM-FL quotes that variance for PNPM, and it is the one of this mechanism. Where it acts, what it
    covers and what it does not are as for `spm`.
    """

    place = "upload"
    paper = "Ren et al., Research on a federated learning-based local differential privacy mechanism (as SPM-FL has it)"
    width = 4
    epsilon: Epsilon = 0.3  # ε in the paper: the budget of each entry and round
