"""Every leakage metric in plain words: its title, unit, private direction and number format. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedveil.errors import unknown_name


@dataclass(frozen=True, kw_only=True)
class Metric:
    """How a metric is named, printed and read.

    >>> metric("psnr").column
    'PSNR (dB) ↓'
    >>> metric("identified").format(0.384)
    '38 %'
    >>> metric("mse").leaks_more(0.1, 1.2)
    True
    """

    name: str
    title: str
    unit: str  # "" where there is none; "%" means a share between 0 and 1 that is printed in percent
    private: Literal["low", "high"]  # the values that mean more privacy
    digits: int  # after the decimal point, as printed
    words: str  # one or two sentences for a reader who meets it for the first time
    within: bool = False  # each value is itself a share, of the parts of one example
    tool: str = ""  # the setting of an audit without which it is not measured

    @property
    def share(self) -> bool:
        """Whether values are shares, printed in percent."""
        return self.unit == "%"

    @property
    def yes_or_no(self) -> bool:
        """Whether each value is a yes or a no, so that the mean is a share."""
        return self.share and not self.within

    @property
    def arrow(self) -> str:
        """The private direction as an arrow."""
        return "↓" if self.private == "low" else "↑"

    @property
    def column(self) -> str:
        """The head of the metric's column in a table."""
        return f"{self.title}{f' ({self.unit})' if self.unit else ''} {self.arrow}"

    def leaks_more(self, one: float, other: float) -> bool:
        """Whether `one` means strictly more leakage than `other`."""
        return one > other if self.private == "low" else one < other

    def format(self, value: float) -> str:
        """A value with its digits and unit."""
        if self.share:
            return f"{100 * value:.{self.digits}f} %"
        return f"{value:.{self.digits}f}{f' {self.unit}' if self.unit else ''}"


def metric(name: str) -> Metric:
    """The metric of that name; an unknown one raises a `FedveilError` that lists them."""
    if name not in METRICS:
        raise unknown_name("metric", name, METRICS)
    return METRICS[name]


METRICS: dict[str, Metric] = {
    each.name: each
    for each in (
        Metric(
            name="identified",
            title="identified",
            unit="%",
            private="low",
            digits=0,
            words="Share of the reconstructions whose nearest example, among the original and held-out ones, is the "
            "original. Guessing gets one in as many as there are.",
        ),
        Metric(
            name="identified_features",
            title="identified by features",
            unit="%",
            private="low",
            digits=0,
            words="As `identified`, but nearest by the features of a network instead of by pixels: it sees through "
            "small shifts and changes of brightness.",
        ),
        Metric(
            name="linked",
            title="linked",
            unit="%",
            private="low",
            digits=0,
            words="Share of the updates whose original was picked among the candidates by comparing the update with "
            "the one that each candidate would have caused; nothing has to be rebuilt.",
        ),
        Metric(
            name="cells",
            title="cells recovered",
            unit="%",
            private="low",
            digits=0,
            words="Share of the cells of a row that were recovered: categories exactly, numbers within a tolerance, by "
            "default a tenth of their column's standard deviation.",
            within=True,
        ),
        Metric(
            name="number_cells",
            title="numbers recovered",
            unit="%",
            private="low",
            digits=0,
            words="The same of the cells that hold numbers.",
            within=True,
        ),
        Metric(
            name="category_cells",
            title="categories recovered",
            unit="%",
            private="low",
            digits=0,
            words="The same of the cells that hold categories. The most frequent one is often right without an update.",
            within=True,
        ),
        Metric(
            name="whole_rows",
            title="whole rows",
            unit="%",
            private="low",
            digits=0,
            words="Share of the rows of which every cell was recovered.",
        ),
        Metric(
            name="whole_sentences",
            title="whole sentences",
            unit="%",
            private="low",
            digits=0,
            words="Share of the sentences that were recovered exactly: every token, in its place.",
        ),
        Metric(
            name="rouge2",
            title="ROUGE-2",
            unit="%",
            private="low",
            digits=1,
            words="Pairs of neighboring words that reconstruction and original share (F-measure). 100 % for the same "
            "words in the same order.",
            within=True,
        ),
        Metric(
            name="rougeL",
            title="ROUGE-L",
            unit="%",
            private="low",
            digits=1,
            words="The longest run of words, with gaps, that both have in the same order (F-measure).",
            within=True,
        ),
        Metric(
            name="rouge1",
            title="ROUGE-1",
            unit="%",
            private="low",
            digits=1,
            words="Words that both share, whatever their order (F-measure). Frequent words alone get some of it: read "
            "it beside the floor.",
            within=True,
        ),
        Metric(
            name="tokens_found",
            title="tokens found",
            unit="%",
            private="low",
            digits=0,
            words="Share of the original's tokens that the reconstruction has, repeats counted, wherever they stand.",
            within=True,
        ),
        Metric(
            name="tokens_placed",
            title="tokens in their place",
            unit="%",
            private="low",
            digits=0,
            words="Share of the original's tokens that stand at the same place in the reconstruction.",
            within=True,
        ),
        Metric(
            name="member_auc",
            title="AUC",
            unit="",
            private="low",
            digits=2,
            words="How often the test scores a member higher than an example that was not used: 1 when it tells all of "
            "them apart, 0.5 when it guesses.",
        ),
        Metric(
            name="member_tpr_1",
            title="found at 1 % false alarms",
            unit="%",
            private="low",
            digits=0,
            words="Share of the members that the test finds when it may take 1 % of the other examples for members, "
            "too. Guessing finds 1 %. Not measured with fewer than 1,000 others.",
        ),
        Metric(
            name="member_tpr_01",
            title="found at 0.1 % false alarms",
            unit="%",
            private="low",
            digits=1,
            words="The same at 0.1 % false alarms. Not measured with fewer than 10,000 others.",
        ),
        Metric(
            name="mse",
            title="MSE",
            unit="",
            private="high",
            digits=3,
            words="Mean squared error in the model's normalized input space, as the papers report it. Always guessing "
            "the mean scores about 1, so a value above 1 shows a failed attack, not a strong defense.",
        ),
        Metric(
            name="psnr",
            title="PSNR",
            unit="dB",
            private="low",
            digits=1,
            words="Peak signal-to-noise ratio as the papers compute it, from the normalized error. Above about 30 dB "
            "two pictures are hard to tell apart.",
        ),
        Metric(
            name="mse_pixel",
            title="pixel MSE",
            unit="",
            private="high",
            digits=4,
            words="Mean squared error of pixels between 0 and 1.",
        ),
        Metric(
            name="psnr_pixel",
            title="pixel PSNR",
            unit="dB",
            private="low",
            digits=1,
            words="Peak signal-to-noise ratio of pixels between 0 and 1.",
        ),
        Metric(
            name="ssim",
            title="SSIM",
            unit="",
            private="low",
            digits=3,
            words="Structural similarity: 1 for the same picture, about 0 for unrelated ones.",
        ),
        Metric(
            name="lpips",
            tool="lpips",
            title="LPIPS",
            unit="",
            private="high",
            digits=3,
            words="Learned perceptual distance: how different two pictures look to a network trained on photographs. "
            "0 for the same picture, above about 0.5 for unrelated ones.",
        ),
        Metric(
            name="kl",
            tool="reference",
            title="KL",
            unit="nats",
            private="high",
            digits=2,
            words="Kullback-Leibler divergence of a reference classifier's judgment: from the original's classes to "
            "the reconstruction's. 0 when it takes both for the same. The classifier is trained on the task's own "
            "images, not the papers' VGG-16.",
        ),
        Metric(
            name="feature_mse",
            tool="reference",
            title="feature MSE",
            unit="",
            private="high",
            digits=3,
            words="Mean squared difference of a reference classifier's features, before its last layer. Its scale is "
            "that of the classifier: compare it within one audit only.",
        ),
        Metric(
            name="logit_mse",
            tool="reference",
            title="logit MSE",
            unit="",
            private="high",
            digits=2,
            words="Mean squared difference of a reference classifier's scores per class, the feature distance of "
            "Inverting Gradients. Compare it within one audit only.",
        ),
        Metric(
            name="leakage_score",
            title="leakage score",
            unit="",
            private="low",
            digits=3,
            words="One minus the mean distance to the original over the attack's steps (FedEM, Eq. 9). Even a gray "
            "picture scores well above 0: read it beside the floor.",
        ),
        Metric(
            name="rdlv",
            title="RDLV",
            unit="",
            private="low",
            digits=2,
            words="Relative data leakage value: how much more similar (SSIM) the reconstruction is than what the "
            "attacker had without the update. 0 means that the update added nothing.",
        ),
        Metric(
            name="attack_loss",
            title="attack loss",
            unit="",
            private="high",
            digits=4,
            words="The attack's final matching cost. It says how well the attack fitted the update, not how much it "
            "found.",
        ),
        Metric(
            name="diverged",
            title="diverged",
            unit="%",
            private="high",
            digits=0,
            words="Share of the reconstructions that came back with infinite or undefined values or cost. Such pixels "
            "are scored as gray, such cells as the mean, such tokens as missing. A high share speaks about the attack, "
            "not about the defense.",
        ),
    )
}

# Metrics that only one kind of data has; all others but those of two kinds are of updates or models, whatever the data.
_CELLS = ("cells", "number_cells", "category_cells", "whole_rows")
_WORDS = ("whole_sentences", "rouge1", "rouge2", "rougeL", "tokens_found", "tokens_placed")
_ONLY_PICTURES = (
    *("psnr", "mse_pixel", "psnr_pixel", "ssim", "lpips", "kl", "feature_mse", "logit_mse", "leakage_score", "rdlv"),
    "identified_features",
)
ONLY = {"records": _CELLS, "sentences": _WORDS, "pictures": _ONLY_PICTURES}


def applies(name: str, kind: str) -> bool:
    """Whether a kind of data has a metric.

    >>> applies("ssim", "pictures"), applies("ssim", "sentences"), applies("linked", "records")
    (True, False, True)
    """
    return not any(name in names for other, names in ONLY.items() if other != kind)
