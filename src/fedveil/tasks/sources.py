"""Where the files of every data set are and where to download them. Importable without torch.

Every checksum here is a published one: SHA-256 where available (Keras for CIFAR, Hugging Face for SST-2 and WikiText-2,
many for MNIST), otherwise the MD5 of the set's authors (MedMNIST) or of torchtext (CoLA). A set without a known source
cannot be downloaded; `how` says where to get its files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import FedveilError


@dataclass(frozen=True)
class Remote:
    """One file to download."""

    url: str
    file: str  # its name in our folder
    digest: str  # "sha256:…" or "md5:…", as published
    size: int | None = None  # bytes, where known


@dataclass(frozen=True)
class Source:
    """The files of one set."""

    folders: tuple[str, ...]  # below the root, in the order in which they are searched
    files: tuple[str, ...]  # each plain or with .gz, and all in one folder
    remotes: tuple[Remote, ...] = ()
    archive: bool = False  # the remote is a .tar.gz that unpacks below the root, or a .zip
    inside: str = ""  # the folder inside of a .zip that has the files
    optional: tuple[str, ...] = ()  # files that the set can do without
    how: str = ""  # to get the files by hand, if there is no download
    aliases: tuple[tuple[str, str], ...] = ()  # (file, another name that it is distributed under)


@dataclass(frozen=True)
class Located:
    """What was found and what is missing in the best folder."""

    folder: Path
    found: dict[str, Path]
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether the set can be read."""
        return not self.missing


def data_root(root: Path | None = None) -> Path:
    """The folder of data files: the given one, else FEDVEIL_DATA, else ~/.cache/fedveil."""
    given = root or os.environ.get("FEDVEIL_DATA") or Path("~/.cache/fedveil")
    return Path(given).expanduser()


def locate(source: Source, root: Path | None = None) -> Located:
    """The first folder with all files; if there is none, the one with the fewest missing."""
    tried = []
    for name in source.folders:
        folder = data_root(root) / name
        places = {stem: _place(source, folder, stem) for stem in (*source.files, *source.optional)}
        found = {stem: path for stem, path in places.items() if path is not None}
        tried.append(Located(folder, found, tuple(stem for stem in source.files if stem not in found)))
        if tried[-1].complete:
            return tried[-1]
    return min(tried, key=lambda each: len(each.missing))


def find_files(name: str, root: Path | None = None) -> dict[str, Path]:
    """The files of a data set by their names without `.gz`, or an error that says what to do.

    All must be in one folder, because files of two sets can have the same names.
    """
    source = SOURCES[name]
    there = locate(source, root)
    if there.complete:
        return there.found
    gz = any(remote.file.endswith("-ubyte.gz") for remote in source.remotes)
    missing = ", ".join(f"{stem}.gz" if gz else stem for stem in there.missing) + (" (or without .gz)" if gz else "")
    it = "them" if len(there.missing) > 1 else "it"
    get = f"get {it} with `fedveil data fetch {name}`" if source.remotes else f"put {it} there"
    raise FedveilError(
        f"{name}: no {missing} in {there.folder}: {get}, or set FEDVEIL_DATA or --data-root to the folder that holds "
        f"{it} or holds {source.folders[0]}/"
    )


def _place(source: Source, folder: Path, stem: str) -> Path | None:
    names = (stem, *(other for file, other in source.aliases if file == stem))
    return next((path for name in names if (path := _plain_or_gz(folder / name)) is not None), None)


def _plain_or_gz(path: Path) -> Path | None:
    choices = (path.with_name(f"{path.name}.gz"), path)
    return next((choice for choice in choices if choice.is_file()), None)


IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
TORONTO = "https://www.cs.toronto.edu/~kriz"
ZENODO = "https://zenodo.org/record/6496656/files"  # MedMNIST v2
CIFAR10_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))


def _idx(name: str, base: str, *files: tuple[int, str]) -> Source:
    remotes = (
        Remote(f"{base}/{stem}.gz", f"{stem}.gz", f"sha256:{digest}", size)
        for stem, (size, digest) in zip(IDX_FILES, files, strict=True)
    )
    return Source((name, "."), IDX_FILES, tuple(remotes))


def _medmnist(name: str, md5: str) -> Source:
    file = f"{name}.npz"
    return Source(("medmnist", name, "."), (file,), (Remote(f"{ZENODO}/{file}?download=1", file, f"md5:{md5}"),))


def _cifar(name: str, folder: str, archive: Remote, files: tuple[str, ...], optional: tuple[str, ...] = ()) -> Source:
    return Source((folder, f"{name}/{folder}", name), files, (archive,), archive=True, optional=optional)


SOURCES = {
    "mnist": _idx(
        "mnist",
        MNIST,
        (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "fashion-mnist": _idx(
        "fashion-mnist",
        FASHION,
        (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    "cifar10": _cifar(
        "cifar10",
        "cifar-10-batches-py",
        Remote(
            f"{TORONTO}/cifar-10-python.tar.gz",
            "cifar-10-python.tar.gz",
            "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            170498071,
        ),
        ("test_batch",),
        CIFAR10_BATCHES,
    ),
    "cifar100": _cifar(
        "cifar100",
        "cifar-100-python",
        Remote(
            f"{TORONTO}/cifar-100-python.tar.gz",
            "cifar-100-python.tar.gz",
            "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            169001437,
        ),
        ("train", "test", "meta"),
    ),
    "pathmnist": _medmnist("pathmnist", "a8b06965200029087d5bd730944a56c1"),
    "chestmnist": _medmnist("chestmnist", "02c8a6516a18b556561a56cbdd36c4a8"),
    "dermamnist": _medmnist("dermamnist", "0744692d530f8e62ec473284d019b0c7"),
    "octmnist": _medmnist("octmnist", "c68d92d5b585d8d81f7112f81e2d0842"),
    "pneumoniamnist": _medmnist("pneumoniamnist", "28209eda62fecd6e6a2d98b1501bb15f"),
    "retinamnist": _medmnist("retinamnist", "bd4c0672f1bba3e3a89f0e4e876791e4"),
    "breastmnist": _medmnist("breastmnist", "750601b1f35ba3300ea97c75c52ff8f6"),
    "bloodmnist": _medmnist("bloodmnist", "7053d0359d879ad8a5505303e11de1dc"),
    "tissuemnist": _medmnist("tissuemnist", "ebe78ee8b05294063de985d821c1c34b"),
    "organamnist": _medmnist("organamnist", "866b832ed4eeba67bfb9edee1d5544e6"),
    "organcmnist": _medmnist("organcmnist", "0afa5834fb105f7705a7d93372119a21"),
    "organsmnist": _medmnist("organsmnist", "e5c39f1af030238290b9557d9503af9d"),
    "nih-chestxray": Source(
        ("nih-chestxray", "."),
        ("Data_Entry_2017.csv",),
        optional=("train_val_list.txt", "test_list.txt"),
        how="get Data_Entry_2017.csv, the two lists and the images from the NIH's own page (nihcc.app.box.com) and "
        "put the images below the same folder",
    ),
    "cola": Source(
        ("cola", "cola_public/raw", "cola/cola_public/raw", "text/cola"),
        ("in_domain_train.tsv", "in_domain_dev.tsv", "out_of_domain_dev.tsv"),
        (
            Remote(
                "https://nyu-mll.github.io/CoLA/cola_public_1.1.zip",
                "cola_public_1.1.zip",
                "md5:9f6d88c3558ec424cd9d66ea03589aba",
            ),
        ),
        archive=True,
        inside="cola_public/raw",
    ),
    "sst2": Source(
        ("sst2", "SST-2", "glue/SST-2", "text/sst2"),
        ("train.tsv", "dev.tsv"),
        (
            Remote(
                "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip",
                "SST-2.zip",
                "sha256:d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",
                7439277,
            ),
        ),
        archive=True,
        inside="SST-2",
        optional=("test.tsv",),
    ),
    "wikitext2": Source(
        ("wikitext-2", "wikitext-2-raw", "wikitext2", "text/wikitext-2"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        # The original address, for which the checksum was published, is gone; this is a copy by the set's author.
        (
            Remote(
                "https://wikitext.smerity.com/wikitext-2-v1.zip",
                "wikitext-2-v1.zip",
                "sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
                4475746,
            ),
        ),
        archive=True,
        inside="wikitext-2",
        aliases=tuple(
            (f"wiki.{part}.tokens", other)
            for part in ("train", "valid", "test")
            for other in (f"wiki.{part}.raw", f"{part}.txt")
        ),
    ),
}
