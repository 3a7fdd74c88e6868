"""Tables: columns of numbers and categories, from arrays, CSV files and by name."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedveil as fv
from fedveil.errors import FedveilError
from fedveil.tasks.columns import Column, Columns
from fedveil.tasks.examples import Examples

ROWS = {
    "age": np.arange(20, 60.0),
    "city": np.array(["Bonn", "Aachen", "Celle", "Bonn"] * 10),
    "smoker": np.array([False, True] * 20),
}
LABELS = np.arange(40) % 2
LINES = ["age,city,smoker,ill", *(f"{20 + i},{'ABC'[i % 3]},{i % 2},{'yes' if i % 4 else 'no'}" for i in range(40))]


def inputs(examples: Examples) -> Tensor:
    found, _ = examples.batch(range(len(examples)))
    assert isinstance(found, Tensor)
    return found


def written(folder: Path, lines: list[str] | bytes, name: str = "rows.csv") -> str:
    content = lines if isinstance(lines, bytes) else "\n".join(lines).encode()
    (folder / name).write_bytes(content)
    return str(folder / name)


def of_csv(path: str, **fields: Any) -> fv.Task:
    return fv.task(fv_spec(path, **fields), model="mlp:hidden=[8]", clients=2)


def fv_spec(path: str, **fields: Any) -> str:
    from fedveil.registry import datasets

    return datasets.spell(datasets.build("csv", path=path, **{"target": "ill", **fields}))


# ---- columns -------------------------------------------------------------------------------------------------

COLUMNS = Columns(
    (Column("age", low=0, high=100, mean=40, std=20), Column("city", ("A", "B", "C")), Column("sex", ("f", "m")))
)


def test_a_row_has_a_place_for_every_number_and_every_category() -> None:
    assert COLUMNS.width == 6
    assert COLUMNS.blocks == ((1, 4), (4, 6))
    row = COLUMNS.encode(torch.tensor([60.0, 2, 0]))
    assert row.tolist() == [1, 0, 0, 1, 1, 0]
    low, high = COLUMNS.box()
    assert low.tolist() == [-2, 0, 0, 0, 0, 0]
    assert high.tolist() == [3, 1, 1, 1, 1, 1]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=5))
def test_cells_come_back_from_rows(cells: list[tuple[float, int, int]]) -> None:
    given_cells = torch.tensor(cells, dtype=torch.float64)
    rows = COLUMNS.encode(given_cells)
    assert torch.allclose(COLUMNS.cells(rows), given_cells)
    assert COLUMNS.settled(rows).equal(rows)


def test_settled_rows_have_the_likeliest_category() -> None:
    found = COLUMNS.settled(torch.tensor([[0.3, 0.2, 0.9, 0.1, -1.0, -2.0]]))
    assert torch.allclose(found, torch.tensor([[0.3, 0.0, 1.0, 0.0, 1.0, 0.0]]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Column(""), "needs a name"),
        (lambda: Column("a", ("x",)), "at least two different categories"),
        (lambda: Column("a", ("x", "x", "y")), "at least two different categories"),
        (lambda: Column("a", low=2, high=1), "low must be less than high"),
        (lambda: Columns((Column("a"), Column("a"))), "2 columns of the table are named 'a'"),
        (lambda: Columns(()), "at least one column"),
    ],
)
def test_columns_that_cannot_be_are_refused(make: Any, said: str) -> None:
    with pytest.raises(FedveilError, match=said):
        make()


# ---- arrays --------------------------------------------------------------------------------------------------


def test_numbers_are_standardized_by_the_training_part_alone() -> None:
    task = fv.Task(nn.Linear(6, 2), (ROWS, LABELS), columns="inferred", clients=2)
    assert task.columns is not None
    assert [column.categories for column in task.columns] == [(), ("Aachen", "Bonn", "Celle"), ("False", "True")]
    age = inputs(task.train)[:, 0]
    assert float(age.mean()) == pytest.approx(0, abs=1e-6)
    assert float(age.std(correction=0)) == pytest.approx(1, abs=1e-6)
    first = task.columns.all[0]
    assert (first.low, first.high) == (20, 59)
    for part in (task.train, task.validation, task.test):
        assert part is not None
        rows = inputs(part)
        low, high = task.columns.box()
        assert bool((rows >= low - 1e-6).all() and (rows <= high + 1e-6).all())
        assert (rows[:, 1:4].sum(1) == 1).all()


def test_an_array_has_categories_by_number() -> None:
    rows = np.stack([np.arange(40.0), np.arange(40) % 3], 1)
    columns = ["dose", Column("city", ("A", "B", "C"))]
    task = fv.Task(nn.Linear(4, 2), (torch.from_numpy(rows), LABELS), columns=columns)
    assert task.columns is not None
    back = task.columns.cells(inputs(task.test).double())
    assert (back[:, 1] == back[:, 0].round() % 3).all()
    with pytest.raises(FedveilError, match="'city' must hold the numbers of its categories, 0 to 2"):
        fv.Task(nn.Linear(4, 2), (rows + 1, LABELS), columns=columns)


def test_all_parts_have_the_training_parts_categories() -> None:
    other = {**ROWS, "city": np.array(["Bonn", "Dorf"] * 20)}
    with pytest.raises(FedveilError, match="'city' holds 'Dorf' in row 2, not one of Aachen, Bonn, Celle"):
        fv.Task(nn.Linear(6, 2), ((ROWS, LABELS), (other, LABELS)), columns="inferred")


def test_clients_with_tables_of_their_own_are_standardized_together() -> None:
    cities = Column("city", ("Aachen", "Bonn", "Celle"))
    older = {"age": ROWS["age"] + 100, "city": ROWS["city"]}
    task = fv.Task(nn.Linear(4, 2), clients=[(ROWS, LABELS), (older, LABELS)], columns=["age", cities])
    assert float(inputs(task.train)[:, 0].mean()) == pytest.approx(0, abs=1e-6)
    fewer = {"age": ROWS["age"], "city": np.array(["Bonn", "Celle"] * 20)}
    with pytest.raises(FedveilError, match="client 1 has the columns age, city"):
        fv.Task(nn.Linear(4, 2), clients=[(ROWS, LABELS), (fewer, LABELS)], columns=["age", "city"])


def test_equal_cells_in_other_columns_are_other_data() -> None:
    rows = np.arange(80.0).reshape(40, 2)
    made = [fv.Task(nn.Linear(2, 2), (rows, LABELS), columns=names) for names in (["a", "b"], ["a", "c"])]
    assert made[0].data_hash != made[1].data_hash


NAN = {**ROWS, "age": np.where(ROWS["age"] == 23, np.nan, ROWS["age"])}


@pytest.mark.parametrize(
    ("rows", "columns", "said"),
    [
        (NAN, "inferred", "column 'age' holds NaN or infinity in row 4"),
        ({**ROWS, "age": np.ones(40)}, "inferred", "column 'age' has a single value, 1, in all training rows"),
        ({**ROWS, "city": np.array(["A"] * 40)}, "inferred", "'city' has a single value, 'A'"),
        (
            {**ROWS, "city": np.array([f"{i}x" * 2 for i in range(40)] * 3)[:40]},
            ["towns"],
            "did you mean|unknown column",
        ),
        (ROWS, [Column("age", low=30)], "'age' holds 20, and its low is said to be 30"),
        (ROWS, [Column("city")], "'city' holds 'Bonn', which is no number, in row 1"),
        (np.ones((40, 2)), ["a"], "have 2 columns, and 1 are named"),
        (np.ones(40), ["a"], "must be an array of numbers"),
        (ROWS, "infer", "columns must be a list"),
    ],
)
def test_bad_tables_are_refused_in_one_line(rows: Any, columns: Any, said: str) -> None:
    with pytest.raises(FedveilError, match=said) as caught:
        fv.Task(nn.Linear(6, 2), (rows, LABELS), columns=columns)
    assert "\n" not in str(caught.value)


# ---- CSV files -----------------------------------------------------------------------------------------------


def test_a_csv_file_is_a_task(tmp_path: Path) -> None:
    task = of_csv(written(tmp_path, LINES), categories=["smoker"])
    assert task.columns is not None
    assert [column.categories for column in task.columns] == [(), ("A", "B", "C"), ("0", "1")]
    assert task.label_names == ("no", "yes")
    assert len(task.test) == 8  # every fifth of each class
    again = fv.task(**task.description)
    assert again.data_hash == task.data_hash


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_separators_line_ends_quotes_and_gzip(tmp_path: Path, separator: str, ending: str) -> None:
    lines = [line.replace(",", separator) for line in LINES]
    text = "\ufeff" + ending.join([*lines, f'"{99}"{separator}"A"{separator}1{separator}yes', ""])
    plain = of_csv(written(tmp_path, text.encode()))
    packed = of_csv(written(tmp_path, gzip.compress(text.encode()), "packed.csv.gz"))
    assert plain.data_hash == packed.data_hash
    assert plain.columns is not None
    assert plain.columns.all[0].high == 99


def test_columns_can_be_dropped_and_rows_with_gaps_too(tmp_path: Path) -> None:
    path = written(tmp_path, [*LINES, "NA,A,1,yes", "30,,1,no"])
    task = of_csv(path, drop=["city"], missing="drop")
    assert task.columns is not None
    assert [column.name for column in task.columns] == ["age", "smoker"]
    assert task.note == "1 row with a missing value left out"


def test_a_test_file_has_the_same_columns_in_any_order(tmp_path: Path) -> None:
    turned = [",".join(reversed(line.split(","))) for line in LINES[:9]]
    task = of_csv(written(tmp_path, LINES), test=written(tmp_path, turned, "test.csv"))
    assert len(task.test) == 8
    assert task.columns is not None
    ages = task.columns.cells(inputs(task.test).double())[:, 0]
    assert ages.tolist() == pytest.approx(list(range(20, 28)))


@pytest.mark.parametrize(
    ("lines", "fields", "said"),
    [
        (b"", {}, "is empty"),
        (LINES[:1], {}, "has a header and no rows"),
        (["a,,ill", "1,2,3"], {}, "a name is missing"),
        (["a,a,ill", "1,2,3"], {}, "2 columns are named 'a'"),
        (LINES, {"target": "illness"}, "unknown column of .* 'illness': did you mean 'ill'?"),
        (LINES, {"drop": ["names"]}, "unknown column of .* 'names'"),
        (LINES, {"drop": ["ill"]}, "'ill' is the target"),
        (LINES, {"drop": ["age", "city", "smoker"]}, "no column beside the target"),
        ([*LINES, "1,2"], {}, "line 42 has 2 values, and the header names 4"),
        ([*LINES, '1,"A,2,yes'], {}, "line 42 cannot be read: unexpected end of data"),
        ([*LINES, "1,,2,yes"], {}, "line 42 has no value in column 'city'"),
        ([*LINES, "1,NaN,2,yes"], {}, "line 42 has no value in column 'city'"),
        ([*LINES, "inf,A,2,yes"], {}, "column 'age' holds NaN or infinity in row 41"),
        ([*LINES, "1,A,2,"], {}, "line 42 has no value in column 'ill'"),
        (LINES[:1] + [f"{i},{'AB'[i % 2]},1,no" for i in range(20)], {}, "target 'ill' has a single value, 'no'"),
        (LINES, {"target": "age"}, "target 'age' has 40 different values in 40 rows"),
        (LINES[:1] + [f"{i},A,{i % 2},{i % 2}" for i in range(20)], {}, "'city' has a single value, 'A'"),
        (LINES[:1] + [f"{i},A{i},1,{i % 2}" for i in range(200)], {}, "'city' has 200 different texts"),
        ("\n".join(LINES).encode() + b"\n\xff\xfe,1,2,3", {}, "line 42 is not UTF-8"),
        (b"\0" * 20, {}, "zero byte"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, lines: Any, fields: dict[str, Any], said: str) -> None:
    path = written(tmp_path, lines)
    with pytest.raises(FedveilError, match=said) as caught:
        of_csv(path, **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("30,Z,1,yes", "'city' holds 'Z' in row 1, not one of A, B, C"),
        ("30,A,1,perhaps", "line 2 has the class 'perhaps', which no training row has"),
    ],
)
def test_what_no_training_row_has_is_refused(tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(FedveilError, match=said):
        of_csv(written(tmp_path, LINES), test=written(tmp_path, [LINES[0], row], "test.csv"))


def test_a_missing_file_and_a_bare_name_say_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(FedveilError, match="there is no file"):
        of_csv(str(tmp_path / "none.csv"))
    with pytest.raises(FedveilError, match=r"a table of your own is csv:path=mine\.csv,target=COLUMN"):
        fv.task("mine.csv", model="mlp")


# ---- by name -------------------------------------------------------------------------------------------------


def test_breast_cancer_is_embedded_and_learned() -> None:
    task = fv.task("breast-cancer", model="mlp", clients=4)
    assert task.columns is not None
    assert len(task.columns) == 30
    assert task.label_names == ("malignant", "benign")
    settings = fv.FederationSettings(rounds=5, lr=0.1, batch_size=16)
    run = fv.federate(task, None, settings)
    assert (run.utility.test or 0) > 0.9
