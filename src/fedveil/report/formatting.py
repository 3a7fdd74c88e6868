"""Numbers and names as the report writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from fedveil.auditing.result import Estimate, Row
from fedveil.leakage.catalog import METRICS, Metric
from fedveil.tasks.measures import measure

SPACE = "\u00a0"
NONE = "–"


def metric(name: str) -> Metric | None:
    """The catalog's entry of a metric; None for one it does not know (a third party's)."""
    return METRICS.get(name)


def is_share(name: str) -> bool:
    """Whether a metric is a fraction that reads better in percent."""
    known = metric(name)
    return known is not None and known.share


def number(value: float | None, digits: int = 2) -> str:
    """A number with a real minus sign; what cannot be computed is a dash.

    >>> number(-0.5, 1), number(float("nan")), number(float("inf")), number(0.00002, 3)
    ('−0.5', '–', '∞', '2.0e−5')
    """
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    small = value != 0 and abs(value) < 0.5 * 10**-digits
    if (small and digits >= 3) or abs(value) >= 1e7:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    text = f"{value:,.{digits}f}"
    if float(text.replace(",", "")) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")


def between(low: float, high: float, digits: int = 2) -> str:
    """An interval; a dash between negative numbers would be misread.

    >>> between(0.301, 0.47), between(-1.1, -0.3, 1)
    ('[0.30–0.47]', '[−1.1, −0.3]')
    """
    texts = number(low, digits), number(high, digits)
    if NONE in texts:
        return ""
    mark = ", " if any("−" in text for text in texts) else "–"
    return f"[{mark.join(texts)}]"


def interval(estimate: Estimate, factor: float = 1, digits: int = 2) -> str:
    """The interval of an estimate. One value has none: the resampled "interval" of its own width would mislead."""
    if math.isnan(estimate.mean):
        return ""
    if estimate.count < 2:
        return "(one value)"
    return between(estimate.low * factor, estimate.high * factor, digits)


def percent(estimate: Estimate | None, digits: int = 0) -> str:
    """A share with its interval, "38 % [30–47]"."""
    if estimate is None or math.isnan(estimate.mean):
        return NONE
    return f"{number(estimate.mean * 100, digits)}{SPACE}% {interval(estimate, 100, digits)}".strip()


def points(estimate: Estimate | None) -> str:
    """A difference of shares with its interval, "−0.7 points [−1.1, −0.3]"."""
    if estimate is None or math.isnan(estimate.mean):
        return NONE
    sign = "+" if estimate.mean > 0 else ""
    return f"{sign}{number(estimate.mean * 100, 1)}{SPACE}points {interval(estimate, 100, 1)}".strip()


def measured(value: float | None, metric: str) -> str:
    """A measure of the model as it is usually written.

    >>> measured(0.912, "accuracy"), measured(0.0123, "mean squared error"), measured(None, "R²")
    ('91.2\\xa0%', '0.0123', '–')
    """
    if value is None or math.isnan(value):
        return NONE
    return measure(metric).shown(value).replace("-", "−").replace(" ", SPACE)


def utility(estimate: Estimate | None, metric: str) -> str:
    """The same with its interval."""
    if estimate is None or measure(metric).share:
        return percent(estimate, 1)
    return f"{measured(estimate.mean, metric)} [{measured(estimate.low, metric)}–{measured(estimate.high, metric)}]"


def utility_change(estimate: Estimate | None, metric: str) -> str:
    """A difference of them with its interval."""
    if estimate is None or measure(metric).share:
        return points(estimate)
    mean, low, high = (measure(metric).change(each) for each in (estimate.mean, estimate.low, estimate.high))
    return f"{mean} [{low}, {high}]".replace("-", "−")


def kept_together(text: str) -> Markup:
    """Text in which no line ends inside a percentage or an interval.

    >>> print(kept_together("38 % [30–47] of <all>"))
    <span class="whole">38 %</span> <span class="whole">[30–47]</span> of &lt;all&gt;
    """
    parts = re.split(r"([−+-]?[\d.,]+[ \u00a0]%|\[[\d.,;–−+% \u00a0-]{1,24}\])", text)
    return Markup("").join(
        Markup('<span class="whole">{}</span>').format(part) if index % 2 else escape(part)
        for index, part in enumerate(parts)
    )


def counted(row: Row, one: str) -> str:
    """How many things a row rests on: "32 images", or "32 updates" where these are linked."""
    count = max((each.count for each in row.metrics.values()), default=0)
    name = one if row.question == "reconstruct" else "update"
    return f"{count:,}{SPACE}{name}" + ("" if count == 1 else "s")


def duration(seconds: float | None) -> str:
    """A time a reader can take in at once.

    >>> duration(0.0042), duration(75), duration(7322)
    ('4.2\\xa0ms', '1\\xa0min 15\\xa0s', '2\\xa0h 2\\xa0min')
    """
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 1:
        return f"{seconds * 1000:.3g}{SPACE}ms"
    if seconds < 60:
        return f"{seconds:.3g}{SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{SPACE}min {rest}{SPACE}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}{SPACE}h {minutes}{SPACE}min"


def size(count: int | None) -> str:
    """A number of bytes.

    >>> size(900), size(246_824)
    ('900\\xa0bytes', '246.8\\xa0kB')
    """
    if count is None:
        return NONE
    value = float(count)
    if value < 1000:
        return f"{count}{SPACE}bytes"
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 1000 or unit == "GB":
            break
    return f"{value:,.1f}{SPACE}{unit}"


def moment(text: str) -> str:
    """An ISO time in UTC, to the minute; text that is none is given back as it is.

    >>> moment("2025-05-01T12:34:56+00:00")
    '2025-05-01, 12:34\\xa0UTC'
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return text
    time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    return f"{time:%Y-%m-%d, %H:%M}{SPACE}UTC"


def setting(value: Any) -> str:
    """A setting as a person writes it: yes and no, lists with commas, numbers without trailing noise."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}".replace("-", "−")
    if isinstance(value, dict):
        return ", ".join(f"{key} {setting(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(setting, value)) or "none"
    return str(value)


def settings(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Settings by name, as a person writes them."""
    return [(name, setting(value)) for name, value in values.items()]


def target(value: NDArray[Any], names: Sequence[str]) -> str:
    """What an example is to be taken for: its class, its labels, or the numbers to predict.

    >>> target(np.array(4), ["a", "b", "c", "d", "coat"])
    'coat'
    >>> target(np.array([1, 0, 1]), ["edema", "mass", "2"]), target(np.array([0, 0]), ["edema", "mass"])
    ('edema, label 2', 'no label')
    >>> target(np.array([0.25, 1.0], dtype=np.float32), [])
    '0.25, 1'
    """
    if value.dtype.kind == "f":
        return ", ".join(f"{each:.4g}" for each in value.reshape(-1).tolist())
    if value.ndim == 0:
        return label(int(value), names)
    held = [label(place, names, "label") for place in np.flatnonzero(value).tolist()]
    return ", ".join(held) or "no label"


def label(number: int, names: Sequence[str], kind: str = "class") -> str:
    """A class or label by its name, where it has one.

    >>> label(4, ["a", "b", "c", "d", "coat"]), label(1, ["0", "1"]), label(7, [])
    ('coat', 'class 1', 'class 7')
    """
    name = names[number] if 0 <= number < len(names) else ""
    return name if name not in ("", str(number)) else f"{kind} {number}"


def prose(text: str) -> Markup:
    """Text with its web addresses as links and `names` as code. A link loads nothing until the reader follows it.

    >>> print(prose("Use `clip` <b>, see https://example.org."))
    Use <code>clip</code> &lt;b&gt;, see <a href="https://example.org" rel="noopener noreferrer">https://example.org</a>.
    """
    parts = []
    for part in re.split(r"(`[^`]+`|https?://[^\s<>\"']*[^\s<>\"'.,;:)])", text):
        if part.startswith("`") and part.endswith("`") and len(part) > 2:
            parts.append(Markup("<code>{}</code>").format(part[1:-1]))
        elif part.startswith(("https://", "http://")):
            parts.append(Markup('<a href="{0}" rel="noopener noreferrer">{0}</a>').format(part))
        else:
            parts.append(kept_together(part))
    return Markup("").join(parts)
