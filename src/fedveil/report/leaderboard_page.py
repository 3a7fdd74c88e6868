"""The leaderboard as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from fedveil.report.environment import environment
from fedveil.study.definition import Scaled
from fedveil.study.leaderboard import Board, table_of
from fedveil.study.tables import as_markdown


def render_leaderboard(scaled: Scaled, boards: Sequence[Board]) -> str:
    """The page as one HTML document without scripts. All text is escaped."""
    done, total = counted(boards)
    return (
        environment()
        .get_template("leaderboard.html")
        .render(
            study=scaled.study,
            scale=scaled.scale,
            notes=_notes(scaled),
            done=done,
            total=total,
            tables=[table_of(board) for board in boards],
        )
    )


def leaderboard_markdown(scaled: Scaled, boards: Sequence[Board]) -> str:
    """The same as Markdown."""
    done, total = counted(boards)
    parts = [f"# {scaled.study.title}", f"Scale: {scaled.scale}. {done} of {total} rows are there.", *_notes(scaled)]
    for board in boards:
        table = table_of(board)
        parts.append(as_markdown(table) if table.rows else f"## {board.name}\n\nNothing of it was run yet.")
    return "\n\n".join(parts) + "\n"


def counted(boards: Sequence[Board]) -> tuple[int, int]:
    """How many rows are there, and of how many."""
    done = sum(len(board.standings) + (board.undefended is not None) for board in boards)
    return done, done + sum(len(board.missing) for board in boards)


def _notes(scaled: Scaled) -> list[str]:
    cuts = scaled.cuts()
    return [*([f"Cut from the full setting: {'; '.join(cuts)}."] if cuts else []), *scaled.study.notes]
