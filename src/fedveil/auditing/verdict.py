"""The verdict: three sentences and a status word that follow from the rows by printed thresholds."""

from __future__ import annotations

from fedveil.auditing.result import Cost, Role, Row, Status, Verdict, recovers
from fedveil.leakage.floors import better_floor
from fedveil.leakage.intervals import Interval, paired

DEFENDED: tuple[Role, ...] = ("naive", "adaptive")
FLOORS: tuple[Role, ...] = ("noise-floor", "mean-floor")


def strongest(rows: list[Row]) -> Row | None:
    """The attacker who identifies most of the defended images (the undefended ones if there is no defense)."""
    attacked = [row for row in rows if row.role in DEFENDED] or [row for row in rows if row.role == "ceiling"]
    return max(attacked, key=recovers, default=None)


def judge(
    rows: list[Row], cost: Cost, guarantee: str, *, groups: list[int], among: int, exposed_above: float, gain: float
) -> Verdict:
    """Judge the strongest attacker against the better floor and the undefended ceiling of the same attack."""
    lead = strongest(rows)
    ceiling = _row(rows, "ceiling", lead.attack if lead else "")
    if lead is None or ceiling is None:
        raise ValueError("a verdict needs at least the undefended row")
    floor = _better_floor(rows, lead.attack)
    status, why = _status(lead, ceiling, floor, groups, exposed_above, gain)
    sentences = [_leakage(rows, lead, ceiling, floor, among), _cost(cost), guarantee]
    return Verdict(status=status, sentences=sentences, why=why, floor=floor.role)


def _status(
    lead: Row, ceiling: Row, floor: Row, groups: list[int], exposed_above: float, gain: float
) -> tuple[Status, str]:
    name = _FLOOR_WORDS[floor.role]
    top = _gain(ceiling, floor, groups)
    if top.low <= gain:
        return "not judged", (
            f"Even without a defense the attack does not beat the {name} (difference {_points(top)}): "
            "this attack says nothing here."
        )
    lowest = lead.metrics["identified"].low
    if lowest > exposed_above:
        return "exposed", (
            f"Even the lower end of the interval, {_percent(lowest)}, is above the threshold of "
            f"{_percent(exposed_above)}."
        )
    above = _gain(lead, floor, groups)
    if above.low <= gain:
        return "no leakage found by these attacks", (
            f"The strongest of these attackers does not recognize clearly more than the {name} alone "
            f"(difference {_points(above)}); a better attack may."
        )
    return "partly exposed", (
        f"The strongest of these attackers beats the {name} (difference {_points(above)}), but the lower end of its "
        f"interval, {_percent(lowest)}, is not above the threshold of {_percent(exposed_above)}."
    )


_FLOOR_WORDS = {"noise-floor": "floor of noise in place of the update", "mean-floor": "floor of the mean image"}


def _leakage(rows: list[Row], lead: Row, ceiling: Row, floor: Row, among: int) -> str:
    chance = f"chance {_percent(1 / among)}, {_FLOOR_WORDS[floor.role]} {_percent(floor.metrics['identified'].mean)}"
    undefended = _share(ceiling)
    knows, does_not = _row(rows, "adaptive", lead.attack), _row(rows, "naive", lead.attack)
    if knows is None and does_not is None:
        return f"No defense: an attacker recognizes {undefended} of the images; {chance}."
    if knows is not None and does_not is not None:
        return (
            f"An attacker who knows the defense recognizes {_share(knows)} of the images, one who does not "
            f"{_share(does_not)}; undefended: {undefended}; {chance}."
        )
    who = "who knows the defense" if knows is not None else "who does not know the defense"
    return f"An attacker {who} recognizes {_share(lead)} of the images; undefended: {undefended}; {chance}."


def _cost(cost: Cost) -> str:
    if cost.rounds == 0 or cost.undefended is None:
        return "Cost: not measured, as no model was trained."
    rounds = f"after {cost.rounds} round{'s' if cost.rounds > 1 else ''}"
    if cost.defended is None or cost.difference is None:
        return f"Test {cost.metric} without a defense {rounds}: {100 * cost.undefended.mean:.1f} %."
    change = cost.difference
    slower = f"; a round takes {cost.slowdown:.2f} times as long" if cost.slowdown else ""
    return (
        f"Cost: test {cost.metric} {100 * cost.undefended.mean:.1f} % → {100 * cost.defended.mean:.1f} % {rounds} "
        f"({100 * change.mean:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}]){slower}."
    )


def _gain(row: Row, floor: Row, groups: list[int]) -> Interval:
    """By how much a row identifies more than the floor, paired on the same images."""
    return paired(row.values["identified"], floor.values["identified"], groups=groups, share=True)


def _better_floor(rows: list[Row], attack: str) -> Row:
    floors = {row.role: row for row in rows if row.role in FLOORS and row.attack in ("", attack)}
    means = {str(role): row.metrics["identified"].mean for role, row in floors.items()}
    best = better_floor("identified", means)
    tied = {role: row for role, row in floors.items() if means[role] == means[best]}
    # Where both recognize equally many, the one that comes nearer to the images is the harder to beat.
    return max(tied.values(), key=lambda row: row.metrics["psnr"].mean)


def _row(rows: list[Row], role: Role, attack: str) -> Row | None:
    return next((row for row in rows if row.role == role and row.attack == attack), None)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _share(row: Row) -> str:
    """How many a row identifies, and how near it comes: a blurred picture can be recognized too."""
    share = row.metrics["identified"]
    interval = f"[{100 * share.low:.0f}–{100 * share.high:.0f}]"
    return f"{100 * share.mean:.0f} % {interval} (at {row.metrics['psnr'].mean:.1f} dB)"


def _points(interval: Interval) -> str:
    return f"{100 * interval.mean:+.0f} points [{100 * interval.low:+.0f}, {100 * interval.high:+.0f}]"
