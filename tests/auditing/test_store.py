"""The store: entries whole or not at all, found by content, made once, private, listed and pruned."""

import datetime
import multiprocessing
import os
import stat
import time
from pathlib import Path

import pytest
import torch

from fedveil.auditing.store import ENTRY, Entry, Store, Wanted


class Numbers:
    """A tensor and a file beside it."""

    def to_entry(self, result, folder):
        (folder / "beside.txt").write_text(str(result))
        return Entry({"number": torch.tensor(result)}, {"half": result / 2}, {"beside.txt": folder / "beside.txt"})

    def from_entry(self, entry):
        assert entry.facts["half"] == int(entry.tensors["number"]) / 2
        return int(entry.files["beside.txt"].read_text())


def keep(store, key, make=lambda folder: 6, about="six"):
    return store.keep("score", Wanted(key, about), Numbers(), make)


def never(folder):
    pytest.fail("it was made again")


def test_what_was_made_is_found_by_every_store_of_the_folder(tmp_path):
    first = Store(tmp_path)
    assert keep(first, "a") == 6
    assert first.made == [("score", "six")]
    second = Store(tmp_path)
    assert keep(second, "a", never) == 6
    assert second.made == []
    assert keep(second, "b", lambda folder: 8) == 8  # another key is another entry


def test_without_a_folder_nothing_is_kept():
    store = Store()
    assert [keep(store, "a", lambda folder, n=n: n) for n in (1, 2)] == [1, 2]
    assert len(store.made) == 2
    assert store.entries() == []


def test_several_are_made_together_and_equal_ones_once(tmp_path):
    store, asked = Store(tmp_path), []
    keep(store, "b")

    def make(names, folder):
        asked.append(names)
        return [(name, 9) for name in names]

    wanted = {"one": Wanted("a", "a"), "two": Wanted("b", "b"), "three": Wanted("a", "a"), "four": Wanted("d", "d")}
    found = store.keep_all("score", wanted, Numbers(), make)
    assert found == {"one": 9, "two": 6, "three": 9, "four": 9}
    assert [sorted(names) for names in asked] in ([["four", "one"]], [["four", "three"]])
    assert list(found) == list(wanted)


def test_each_of_several_is_kept_as_it_comes(tmp_path):
    wanted = {name: Wanted(name, name) for name in ("first", "second", "third")}

    def stops(names, folder):
        (folder / "half").write_text("half")
        yield "first", 1
        yield "second", 2
        raise RuntimeError("stopped")

    store = Store(tmp_path)
    with pytest.raises(RuntimeError, match="stopped"):
        store.keep_all("score", wanted, Numbers(), stops)
    assert store.made == [("score", "first"), ("score", "second")]
    asked = []

    def rest(names, folder):
        asked.extend(names)
        return [(name, 3) for name in names]

    assert Store(tmp_path).keep_all("score", wanted, Numbers(), rest) == {"first": 1, "second": 2, "third": 3}
    assert asked == ["third"]
    left = sorted(path.name for path in (tmp_path / "score").iterdir() if path.is_dir())
    assert left == ["first", "second", "third"]
    assert sorted(path.name for path in (tmp_path / "score" / "first").iterdir()) == ["beside.txt", ENTRY]


@pytest.mark.parametrize("name", [ENTRY, "beside.txt"])
@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
def test_a_damaged_entry_is_made_again(tmp_path, name, how):
    keep(Store(tmp_path), "a")
    path = tmp_path / "score" / "a" / name
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flip":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        path.unlink()
    store = Store(tmp_path)
    assert keep(store, "a") == 6
    assert store.made
    assert keep(Store(tmp_path), "a", never) == 6


def test_a_stage_that_fails_leaves_its_unfinished_work_and_no_entry(tmp_path):
    def fails(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("on the way")

    with pytest.raises(RuntimeError):
        keep(Store(tmp_path), "a", fails)
    seen = []

    def goes_on(folder):
        seen.append((folder / "half").read_text())
        return 6

    assert keep(Store(tmp_path), "a", goes_on) == 6
    assert seen == ["half"]
    assert sorted(path.name for path in (tmp_path / "score").iterdir()) == ["a"]
    assert sorted(path.name for path in (tmp_path / "score" / "a").iterdir()) == ["beside.txt", ENTRY]


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_only_the_user_may_enter(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir(mode=0o755)
    keep(Store(folder), "a")
    for place in (folder, folder / "score", folder / "score" / "a"):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


def _slow(folder, mark, queue):
    def make(work):
        with Path(mark).open("a") as file:
            file.write("made\n")
        time.sleep(0.5)
        return 6

    queue.put(keep(Store(folder), "a", make))


def test_two_processes_make_an_entry_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    mark = tmp_path / "mark"
    both = [context.Process(target=_slow, args=(tmp_path / "store", mark, queue)) for _ in range(2)]
    for process in both:
        process.start()
    assert [queue.get(timeout=600) for _ in both] == [6, 6]
    for process in both:
        process.join(600)
    assert mark.read_text() == "made\n"


def test_entries_are_listed_and_pruned_by_when_they_were_used(tmp_path):
    store = Store(tmp_path)
    keep(store, "old", about="the old one")
    keep(store, "new", about="the new one")
    long_ago = time.time() - 5 * 86400
    os.utime(tmp_path / "score" / "old" / ENTRY, (long_ago, long_ago))
    listed = store.entries()
    assert [each.about for each in listed] == ["the old one", "the new one"]
    assert all(each.bytes > 0 for each in listed)
    assert [each.about for each in store.prune(datetime.timedelta(days=3))] == ["the old one"]
    keep(store, "new", never)
    os.utime(tmp_path / "score" / "new" / ENTRY, (long_ago, long_ago))
    keep(store, "new", never)  # reading it is using it
    assert store.prune(datetime.timedelta(days=3)) == []
    assert len(store.prune()) == 1
    assert store.entries() == []
