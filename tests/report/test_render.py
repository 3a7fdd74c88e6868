"""The report tells everything, in order, escaped, and loads nothing."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from fedveil.attacks.threat import ThreatModel
from fedveil.auditing.result import TOGETHER, AuxiliaryData, Images, Result, Warned, load_result, save_result
from fedveil.auditing.roles import ROLES, wording
from fedveil.errors import FedveilError
from fedveil.leakage.pictures import Pictures
from fedveil.report import formatting, render, write_report
from fedveil.report.grid import grid
from fedveil.report.pictures import LARGEST_SIDE, data_uri
from fedveil.report.view import MOST_COLUMNS, beside, floor, lead
from fedveil.tasks.client_labels import ClientLabels

from .report_samples import HOSTILE, SAMPLES, bare, card, full, hostile, links

HEADINGS = [
    "What the updates give away",
    "Verdict:",
    "How it was judged",
    "See for yourself",
    "Linked without a picture",
    "Told who was a member",
    "Numbers",
    "Cost",
    "How the attack went",
    "Who holds what",
    "What was assumed",
    "The defense",
    "Do it again",
]


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
        if {"h1", "h2"} & set(self.open) and data.strip():
            self.headings.append(data.strip())

    @property
    def text(self) -> str:
        return re.sub(r"[\s\u00a0\u200b]+", " ", "".join(self.words))


@pytest.fixture(scope="module", params=SAMPLES)
def page(request: pytest.FixtureRequest) -> Page:
    return Page(render(*SAMPLES[request.param]()))


@pytest.fixture(scope="module")
def whole() -> Page:
    return Page(render(*full()))


def test_sections_stand_in_the_order_of_the_contract(page: Page) -> None:
    assert [heading for heading in page.headings if heading in HEADINGS] == HEADINGS
    assert len(page.headings) == len(HEADINGS) + 1  # the status stands in the heading of the verdict


def test_the_page_loads_and_runs_nothing(page: Page) -> None:
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert (attributes.get("src") or "data:").startswith("data:")
        if "href" in attributes:
            assert tag == "a"
            assert (attributes["href"] or "").startswith("https://")
    policies = [attributes["content"] for _, attributes in page.tags if attributes.get("http-equiv")]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_the_style_loads_nothing() -> None:
    style = re.search(r"<style>(.*?)</style>", render(*full()), re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import|http", style.group(1))


def test_hostile_text_is_shown_as_text() -> None:
    text = render(*hostile())
    assert HOSTILE not in text
    assert "49" not in re.findall(r"onerror=alert\(1\)&gt;(..)", text)
    assert text.count("&lt;script&gt;") >= 15
    assert Page(text).text.count(HOSTILE) >= 15


def test_the_verdict_is_told_in_words_with_its_thresholds(whole: Page) -> None:
    result, _ = full()
    assert f"Verdict: {result.verdict.status}" in whole.text
    verdict = result.verdict
    answers = [text for answer in verdict.answers for text in (answer.asked, answer.why)]
    for sentence in (*verdict.sentences, verdict.why, *answers, *verdict.notes, *verdict.thresholds):
        assert sentence in whole.text
    assert "safe" not in whole.text.lower()


def test_an_open_verdict_says_what_would_settle_it() -> None:
    result, images = full()
    verdict = result.verdict.model_copy(
        update={"status": "not judged", "next_step": "Use about 90 updates.", "command": "fedveil audit --victims 90"}
    )
    warned = verdict.model_copy(update={"warnings": [Warned(words="quiet one."), Warned(words="loud one.", loud=True)]})
    text = Page(render(result.model_copy(update={"verdict": warned}), images)).text
    assert "What would settle it: Use about 90 updates." in text
    assert "fedveil audit --victims 90" in text[: text.index("How it was judged")]
    assert text.index("Warning: loud one.") < text.index("Note: quiet one.")


def test_the_head_says_what_was_attacked_and_every_setting(whole: Page) -> None:
    head = whole.text[: whole.text.index("Verdict:")]
    assert "Attacked: 32 updates of one image each, at the untrained model." in head
    assert "gradient-dropout (keep 0.8, sigma 0.005, at step)" in head
    result, images = full()
    chained = card(name="clip + sign", settings={"clip.norm": 1.0, "sign.scale": "one"})
    text = Page(render(result.model_copy(update={"defense": chained, "attacked": ""}), images)).text
    assert "clip (norm 1), then sign (scale one)" in text
    assert "Attacked: 32 updates of one image each." in text  # of an earlier result, as far as it is known


def test_the_first_screen_needs_no_training(whole: Page) -> None:
    first = whole.text[: whole.text.index("How it was judged")].lower()
    for word in ("db", "floor", "by features", "psnr", "adaptive", "ceiling", "bound"):
        assert not re.search(rf"\b{word}\b", first), word
    # The perturbed input is not called a bound; only a guarantee is.
    assert "bound" not in re.sub(r"bounds nothing|formal bound", "", whole.text.lower())


def test_the_summary_has_four_pictures_and_who_ran_what() -> None:
    result, images = full()
    text = render(result, images)
    four = text[text.index('<figure class="four">') : text.index("</figure>")]
    assert four.count("<img ") == 4
    shown = Page(text).text
    ran = shown[shown.index("Who ran what") : shown.index("How it was judged")]
    for piece in ("fedveil 0.1.0", "3 min 12 s", "Linux x86-64", "inverting-gradients", "9f86d0819f86…"):
        assert piece in ran


def test_only_the_pictures_are_unfolded() -> None:
    folds = [
        (attributes["id"], "open" in attributes) for tag, attributes in Page(render(*full())).tags if tag == "details"
    ]
    assert len(folds) == len(HEADINGS) - 2
    assert [name for name, opened in folds if opened] == ["pictures"]


def test_a_defense_that_no_informed_attacker_met_is_not_shown_as_met() -> None:
    result, images = full()
    text = Page(render(result.model_copy(update={"defense": card(uninformed=["mine"])}), images)).text
    assert "Knows the defensenot tried" in text


def test_each_round_has_its_rows() -> None:
    result, images = full()
    rounds = [row.model_copy(update={"round": number, "strongest": False}) for number in (1, 5) for row in result.rows]
    answers = [each.model_copy(update={"round": 5}) for each in result.verdict.answers]
    verdict = result.verdict.model_copy(update={"answers": answers})
    both = result.model_copy(update={"rows": [*result.rows, *rounds], "verdict": verdict})
    text = Page(render(both, images)).text
    assert text.count("round 5, inverting-gradients, 32 images") == text.count("all rounds, inverting-gradients") > 0
    assert "Out of 100, in round 5," in text
    strongest = lead(both)
    assert strongest is not None
    assert strongest.round is None


def test_classes_are_named(whole: Page) -> None:
    assert "Image 21 t-shirt/top" in whole.text
    result, images = full()
    assert "Image 21 class 0" in Page(render(result.model_copy(update={"label_names": []}), images)).text


def test_the_first_screen_says_who_recognizes_how_many(whole: Page) -> None:
    result, _ = full()
    heads = ("Who picks the right image", "Who links updates to the right image", "How it was judged")
    start, middle, end = map(whole.text.index, heads)
    strips = {"reconstruct": whole.text[start:middle], "link": whole.text[middle:end]}
    for question, measure in (("reconstruct", "identified"), ("link", "linked")):
        first, strip = lead(result, question), strips[question]  # type: ignore[arg-type]
        for role in ("ceiling", "naive", "adaptive", floor(result, question)):  # type: ignore[arg-type]
            row = beside(result, first, role)  # type: ignore[arg-type]
            assert row is not None
            assert row.question == question
            assert ROLES[row.role].plain in strip
            assert formatting.percent(row.metrics[measure]).replace(formatting.SPACE, " ") in strip
        assert "chance (1 %)" in strip


def test_every_number_of_the_table_has_its_interval() -> None:
    text = render(*full())
    rows = re.findall(r"<tr class=.*?</tr>", text, re.DOTALL)
    result, _ = full()
    parts = math.ceil(len(result.rows[0].metrics) / MOST_COLUMNS)
    linked = [row for row in result.rows if row.question == "link"]
    assert len(rows) == parts * (len(result.rows) - len(linked)) + len(linked)
    rows = [row for row in rows if "exact likelihood" not in row and "similarity" not in row]
    cells = [cell for row in rows for cell in re.findall(r'<td class="number">(.*?)</td>', row)]
    assert cells
    for cell in cells:
        assert cell == formatting.NONE or re.search(r'<span class="between">\[.+\]</span>', cell), cell
    assert sum("★ strongest attack" in row for row in rows) == parts


def test_rows_go_from_no_defense_to_the_perturbed_input(whole: Page) -> None:
    table = whole.text[whole.text.index("Who reconstructs") : whole.text.index("How to read the rows")]
    places = [table.index(words.who) for words in wording(ROLES, Pictures.words).values()]
    assert places == sorted(places)


def test_pictures_are_worst_first_and_at_most_sixteen() -> None:
    result, images = full()
    shown = grid(result, images)
    strongest = lead(result)
    assert strongest is not None
    assert strongest.role == "adaptive"
    indices = [int(case.name.split()[1]) - 1 for case in shown.cases]
    leaked = [(strongest.values["identified"][i], strongest.values["psnr_pixel"][i]) for i in indices]
    assert leaked == sorted(leaked, reverse=True)
    assert len(shown.cases) == 16
    assert shown.total == 32
    assert shown.columns == ["ceiling", "naive", "adaptive", floor(result)]
    assert f"{strongest.values['psnr_pixel'][indices[0]]:.1f}\u00a0dB" == shown.cases[0].cells[2].near


def test_comparisons_stay_with_the_strongest_attack() -> None:
    result, _ = full(("first", "second"), count=4)
    rows = [row.model_copy(update={"strongest": row.attack == "second" and row.role == "naive"}) for row in result.rows]
    first, *others = result.verdict.answers
    for named in ({"role": "naive", "attack": "second"}, {"role": None}):  # named by the answer, or marked
        verdict = result.verdict.model_copy(update={"answers": [first.model_copy(update=named), *others]})
        told = result.model_copy(update={"rows": rows, "verdict": verdict})
        _assert_all_of_one_attack(told, "second")


def _assert_all_of_one_attack(result: Result, attack: str) -> None:
    for role in ("ceiling", "naive", "adaptive", "noise-floor"):
        row = beside(result, lead(result), role)  # type: ignore[arg-type]
        assert row is not None
        assert row.attack == attack


def test_sections_with_nothing_to_say_say_so() -> None:
    text = Page(render(*bare())).text
    for sentence in (
        "This audit did not train",
        "This result does not say how the data lay over the clients.",
        "The result names no assumptions",
        "Nothing was withheld by name.",
        "None are recorded, which does not mean that there are none.",
        "No hashes were recorded.",
        "No reconstructions to show for: knows the defense; floor: noise in place of the update.",
        "Knows the defensenot tried",
        "rest on a single image",
        "100 % (one value)",
    ):
        assert sentence in text
    assert "nan" not in text.lower()
    result, images = bare()
    empty = result.model_copy(update={"rows": [], "attacks": []})
    text = Page(render(empty, Images(images.originals[:0], images.labels[:0]))).text
    assert "No images were kept" in text
    assert "No attack was measured" in text
    assert "No attack was run." in text


def test_who_holds_what_is_drawn_from_the_saved_result(whole: Page, tmp_path: Path) -> None:
    result, images = full()
    assert result.holdings is not None
    save_result(result, images, tmp_path)
    assert render(*load_result(tmp_path)) == render(result, images)
    section = whole.text[whole.text.index("Who holds what") : whole.text.index("What was assumed")]
    for size in result.holdings.sizes:
        assert f"{size:,}" in section
    assert f"{result.holdings.distance:.2f} (by chance {result.holdings.distance_by_chance:.2f})" in section


def test_running_text_has_no_labels_to_draw() -> None:
    result, images = full()
    held = ClientLabels(labels=[], sizes=[3, 5], counts=[[], []])
    text = Page(render(result.model_copy(update={"holdings": held}), images)).text
    assert "3 and 5" in text
    assert "there are no labels to count" in text


# ---- linking ---------------------------------------------------------------------------------------------------


def test_each_question_has_its_status_on_the_first_screen(whole: Page) -> None:
    result, _ = full()
    first = whole.text[whole.text.index("Verdict:") : whole.text.index("How it was judged")]
    assert [answer.status for answer in result.verdict.answers] == [
        "no leakage found by these attacks",
        "exposed",
        "not judged",
    ]
    for answer in result.verdict.answers:
        assert f"{answer.asked}{answer.status}" in first.replace(f"{answer.asked} ", answer.asked)
    below = whole.text[whole.text.index("How it was judged") : whole.text.index("See for yourself")]
    for answer in result.verdict.answers:
        assert f"{answer.asked} {answer.status.capitalize()}." in below
        assert f"{answer.sentence} {answer.why}".strip() in below


def test_links_are_told_with_their_floor_and_what_is_formally_allowed() -> None:
    result, images = full()
    rows = [row for row in result.rows if row.question == "reconstruct"] + links(32)
    text = Page(render(result.model_copy(update={"rows": rows}), images)).text
    section = text[text.index("Linked without a picture") : text.index("How to read the rows")]
    for piece in ("30 of 32", "94 % [80–98]", "≤ 37 %", "exact likelihood", "Floor: noise in place of the update"):
        assert piece in section, piece
    assert "the solid one is the most that the formal guarantee allows any attacker" in section
    plain = Page(render(*full())).text
    assert "no formal bound" in plain
    assert "the solid one" not in plain


def test_links_of_each_round_are_in_the_table() -> None:
    result, images = full()
    rounds = [row.model_copy(update={"round": number, "strongest": False}) for number in (1, 5) for row in result.rows]
    text = Page(render(result.model_copy(update={"rows": [*result.rows, *rounds]}), images)).text
    assert text.count("round 5, link") == 4


def test_where_nothing_was_linked_the_page_says_so() -> None:
    text = Page(render(*bare())).text
    assert "No attack of this audit links updates" in text
    assert "Who links" not in text


def test_of_several_attacks_the_numbers_are_the_worst_case_and_each_picture_the_winners() -> None:
    result, images = full(("first", "second"), count=12)
    strongest = lead(result)
    assert strongest is not None
    assert strongest.attack == TOGETHER
    for role in ("ceiling", "naive", "adaptive"):
        row = beside(result, strongest, role)  # type: ignore[arg-type]
        assert row is not None
        assert row.attack == TOGETHER
    assert "(chance 1 %), each time with first" in Page(render(result, images)).text
    strongest = strongest.model_copy(update={"winners": ["first", "second"] * 6})
    rows = [strongest if (row.attack, row.role) == (TOGETHER, "adaptive") else row for row in result.rows]
    result = result.model_copy(update={"rows": rows})
    shown = grid(result, images)
    assert {case.cells[2].attack for case in shown.cases} == {"first", "second"}
    for case in shown.cases:
        index, cell = int(case.name.split()[1]) - 1, case.cells[2]
        own = result.row("adaptive", strongest.winners[index])
        assert own is not None
        assert (cell.attack, cell.near) == (own.attack, f"{own.values['psnr_pixel'][index]:.1f}\u00a0dB")
        assert cell.picture == data_uri(images.reconstructions[own.attack, "adaptive"][index])
    text = Page(render(result, images)).text
    assert f"{TOGETHER}, 12 images" in text
    assert "Of several attacks, the one is shown and named that got most of the image." in text


def test_several_attacks_of_a_version_that_kept_no_winners_show_those_of_the_strongest() -> None:
    result, images = full(("first", "second"), count=12)
    rows = [row.model_copy(update={"winners": [], "strongest": False}) for row in result.rows]
    rows = [
        row.model_copy(update={"strongest": True}) if (row.attack, row.role) == ("second", "adaptive") else row
        for row in rows
    ]
    shown = grid(result.model_copy(update={"rows": rows}), images)
    (marked,) = [row for row in rows if row.strongest]
    index = int(shown.cases[0].name.split()[1]) - 1
    assert shown.cases[0].cells[2].near == f"{marked.values['psnr_pixel'][index]:.1f}\u00a0dB"
    assert not any(cell.attack for case in shown.cases for cell in case.cells)


def test_the_page_says_what_each_attacker_has_and_learned_from() -> None:
    result, images = full()
    assert "What the attacker has" not in Page(render(result, images)).text  # of a version that did not keep it
    has = ThreatModel(has=("labels", "auxiliary data (5,000 held-out test images)"), knows=(HOSTILE,))
    rows = [row.model_copy(update={"threat": has}) for row in result.rows]
    data = AuxiliaryData(source="fashion-mnist", part="held-out test images", used=5000)
    told = result.model_copy(update={"rows": rows, "auxiliary": data, "suite": "quick"})
    page = Page(render(told, images))
    assert page.text.count("What the attacker has") == 2  # of those who rebuild, and of those who link
    assert page.text.count(has.words) == len(rows)
    assert "5,000 held-out test images of fashion-mnist" in page.text
    assert "(suite quick)" in page.text


def test_small_samples_are_said_to_be_small(whole: Page) -> None:
    assert "Small sample." not in whole.text
    assert "rest on only 12 images" in Page(render(*hostile())).text


def test_everything_to_do_it_again_is_there(whole: Page) -> None:
    made = full()[0].provenance
    for piece in (
        made.command,
        made.machine,
        *made.versions.values(),
        *made.hashes.values(),
        'model = "lenet"',
        "for fedveil audit --config FILE",
    ):
        assert piece in whole.text


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 256, 256), (2, 20, 300), (5, 1, 1)])
def test_pictures_of_any_shape(shape: tuple[int, int, int]) -> None:
    import base64
    from io import BytesIO

    from PIL import Image

    picture = np.linspace(-0.5, 1.5, math.prod(shape), dtype=np.float32).reshape(shape)
    picture[0, 0, 0] = np.nan
    image = Image.open(BytesIO(base64.b64decode(data_uri(picture).split(",")[1])))
    assert image.mode == ("RGB" if shape[0] == 3 else "L")
    assert max(image.size) <= LARGEST_SIDE
    if max(shape[1:]) <= LARGEST_SIDE:
        assert image.size == (shape[2], shape[1])


def test_the_report_stays_small() -> None:
    assert len(render(*full())) < 1_000_000
    result, images = full()
    rng = np.random.default_rng(0)  # noise in color is the worst case: it does not compress
    large = Images(rng.random((32, 3, 256, 256), dtype=np.float32), images.labels)
    for key in images.reconstructions:
        large.reconstructions[key] = rng.random((32, 3, 256, 256), dtype=np.float32)
    assert len(render(result, large)) < 8_000_000


def test_images_that_do_not_fit_are_refused() -> None:
    result, images = bare()
    images.reconstructions[("dlg", "naive")] = np.zeros((1, 3, 8, 8), dtype=np.float32)
    with pytest.raises(FedveilError, match=r"dlg \(naive\).*must agree"):
        render(result, images)
    with pytest.raises(FedveilError, match="is needed"):
        render(result, Images(np.zeros((8, 8), dtype=np.float32), images.labels))
    for labels in (np.zeros((1, 2, 1), dtype=np.int64), np.full(1, np.nan), np.array(["cat"])):
        with pytest.raises(FedveilError, match="one number or a row of numbers for each is needed"):
            render(result, Images(images.originals, labels))


def test_write_report(tmp_path: Path) -> None:
    write_report(*bare(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render(*bare())
    with pytest.raises(FedveilError, match="cannot write"):
        write_report(*bare(), tmp_path / "no" / "report.html")


def test_the_report_needs_no_torch() -> None:
    code = "import fedveil.report, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
