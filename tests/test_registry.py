"""Registries: names without imports, third parties through entry points, and specs that read back."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.registry import REGISTRIES, Registry


@pytest.fixture
def registry():
    return Registry("gadget", "fedveil.gadgets", "fedveil_no_such_package")


def install(folder, name, points, source=""):
    """A distribution as pip leaves it: a module, and a dist-info folder with its entry points."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{point} = {target}\n" for point, target in points.items())
    (info / "entry_points.txt").write_text(f"[fedveil.gadgets]\n{lines}")


GADGET = '''
from fedveil.fields import declared

@declared
class Gadget:
    """A gadget."""
    size: int = 1
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - before:
        if module.startswith("acme"):
            del sys.modules[module]


# ---- third parties -----------------------------------------------------------------------------------


def test_a_third_party_adds_its_own(registry, folder):
    install(folder, "acme-gadgets", {"acme": "acme_gadgets:Gadget"}, GADGET)
    entry = registry.entries()["acme"]
    assert (entry.target, entry.summary) == ("acme_gadgets:Gadget", "from acme-gadgets")
    assert "acme_gadgets" not in sys.modules  # known, not yet imported
    assert registry.parse("acme:size=3").size == 3
    assert registry.load("acme") is sys.modules["acme_gadgets"].Gadget
    assert registry.spell(registry.build("acme", size=3)) == "acme:size=3"
    with pytest.raises(FedveilError, match="Gadget: no field 'sise'"):
        registry.build("acme", sise=3)


def test_a_third_party_that_does_not_load(registry, folder):
    install(folder, "acme-a", {"gone": "acme_nowhere:Gadget"})
    install(folder, "acme-b", {"empty": "acme_b:Gadget"})
    with pytest.raises(FedveilError, match="cannot load the gadget 'gone' from acme_nowhere:Gadget: No module"):
        registry.load("gone")
    with pytest.raises(FedveilError, match="cannot load the gadget 'empty' from acme_b:Gadget"):
        registry.load("empty")


def test_two_third_parties_with_one_name(registry, folder):
    install(folder, "acme-a", {"same": "acme_a:Gadget", "other": "acme_a:Gadget"}, GADGET)
    install(folder, "acme-b", {"same": "acme_b:Gadget"}, GADGET)
    with pytest.raises(FedveilError, match=r"'same' is taken twice, by .*: uninstall one"):
        registry.load("same")
    assert registry.load("other")().size == 1  # the others still serve


def test_a_third_party_cannot_take_our_names(folder):
    install(folder, "acme-a", {"mine": "acme_a:Gadget"}, GADGET)
    registry = own(folder)
    with pytest.raises(FedveilError, match="'mine' is taken twice"):
        registry.load("mine")


# ---- own sources -------------------------------------------------------------------------------------


def own(folder):
    package = folder / "acme_own"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text(
        "raise_if_imported = 1 / 0\n"
        "@gadgets.register('mine')\n"
        "@declared\n"
        "class Mine:\n"
        "    'What it does.\\n\\n    More.'\n"
        "    place = 'gradient'\n"
        "    computed = 1 + raise_if_imported\n"
        "@other.register('not-mine')\n"
        "class Other: ...\n"
    )
    return Registry("gadget", "fedveil.gadgets", "acme_own")


def test_own_names_are_read_from_the_sources(folder):
    entries = own(folder).entries()
    assert list(entries) == ["mine"]
    entry = entries["mine"]
    assert (entry.target, entry.summary, entry.constants) == (
        "acme_own.one:Mine",
        "What it does.",
        {"place": "gradient"},
    )


def test_what_a_class_inherits_is_read_too(folder):
    package = folder / "acme_heirs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text(
        "class Base:\n"
        "    place: ClassVar[str] = 'upload'\n"
        "    paper: ClassVar[str] = ''\n"
        "    size: int = 3\n"
        "    computed = 2\n"
    )
    (package / "two.py").write_text(
        "class Middle(base.Base):\n"
        "    paper = 'A paper'\n"
        "    computed = 1 + raise_if_imported\n"
        "@gadgets.register('two')\n"
        "class Two(Middle, Elsewhere):\n"
        "    'A second one.'\n"
    )
    registry = Registry("gadget", "fedveil.gadgets", "acme_heirs")
    assert registry.entries()["two"].constants == {"place": "upload", "paper": "A paper"}


def test_constants_of_defenses_are_those_of_their_classes():
    for name, entry in REGISTRIES["defenses"].entries().items():
        cls = REGISTRIES["defenses"].load(name)
        facts = {key: getattr(cls, key) for key in ("place", "promises", "paper")}
        assert {key: entry.constants[key] for key in facts} == facts, name


def test_a_script_cannot_take_our_names(folder):
    with pytest.raises(FedveilError, match=r"the gadget name 'mine' is taken by acme_own\.one\.Mine"):
        own(folder).register("mine")(type("Script", (), {}))


def test_names_are_known_without_torch():
    script = (
        "import sys; from fedveil.registry import REGISTRIES\n"
        "names = {kind: len(registry.entries()) for kind, registry in REGISTRIES.items()}\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_registered_class_loads_under_its_name(kind):
    for name, entry in REGISTRIES[kind].entries().items():
        cls = REGISTRIES[kind].load(name)
        assert cls.name == name
        assert entry.summary, f"{name} has no docstring"


# ---- the decorator -----------------------------------------------------------------------------------


def test_a_name_is_taken_once(registry):
    class First: ...

    class Second: ...

    assert registry.register("x")(First) is First
    assert First.name == "x"
    registry.register("x")(First)  # a module loaded again brings the same class
    with pytest.raises(FedveilError, match=r"the gadget name 'x' is taken by .*First"):
        registry.register("x")(Second)
    assert registry.load("x") is First


def test_the_nearest_name_is_offered(registry):
    for name in ("gradient-dropout", "clip"):
        registry.register(name)(type(name, (), {}))
    with pytest.raises(FedveilError, match="unknown gadget 'gradient-dropuot': did you mean 'gradient-dropout'"):
        registry.load("gradient-dropuot")
    with pytest.raises(FedveilError, match="unknown gadget 'zzz': there are clip, gradient-dropout"):
        registry.parse("zzz:a=1")


# ---- specs that read back ----------------------------------------------------------------------------


@declared
class Everything:
    number: float = 0.5
    whole: int = 3
    flag: bool = False
    word: str = "plain"
    numbers: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    nested: tuple[tuple[int, ...], ...] = ()


@declared
class Required:
    size: int
    scale: float = 1.0


shelf = Registry("gadget", "fedveil.gadgets", "fedveil_no_such_package")
shelf.register("everything")(Everything)
shelf.register("required")(Required)

texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        "1",
        "1.5",
        "true",
        "8/255",
        "inf",
        "nan",
        "[a]",
        "a,b",
        "a=b",
        '"',
        "'",
        "\\",
        "it's",
        "",
        " a ",
        "2020-01-01",
        "#",
    ]
)
reals = st.floats(allow_nan=False)


@settings(deadline=None)
@given(
    st.builds(
        Everything,
        number=reals,
        whole=st.integers(),
        flag=st.booleans(),
        word=texts,
        numbers=st.lists(reals, max_size=3),
        words=st.lists(texts, max_size=3),
        nested=st.lists(st.lists(st.integers(), max_size=2), max_size=2),
    )
)
def test_what_is_spelled_reads_back(thing):
    assert shelf.parse(shelf.spell(thing)) == thing
    described = shelf.describe(thing)
    assert shelf.build(described.pop("name"), **described) == thing


def test_spelling_is_short():
    assert shelf.spell(Everything()) == "everything"
    assert shelf.spell(Everything(number=1e-5, flag=True, word="group", words=["a", "1"])) == (
        'everything:number=1e-05,flag=true,word=group,words=[a,"1"]'
    )
    assert shelf.spell(Required(size=2)) == "required:size=2,scale=1"
