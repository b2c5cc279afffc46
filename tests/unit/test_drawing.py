"""Pictures have one colour for each restore pair, and text that can be read.

They are read in a real browser and in files.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from matplotlib.text import Text

from bench import memory_saving, redraw, restore_regions
from docs import pictures
from pmoe.planner.drawing import PAIRS, SERIES, THEME, Point, inline_svg, scatter_figure
from pmoe.planner.priced_choices import step_bars
from pmoe.planner.timeline import LEGEND, ON_COLOUR, Span, drawing
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES
from tests.browser import Page
from tests.unit.test_docs import difference
from tests.unit.test_report import MEASURE

DOCS_PIXELS = 720
"""Width of a page's text on the documentation's site."""


def brightness(colour: str) -> float:
    """Returns the relative luminance of a colour, as the web's accessibility rules define it."""
    parts = [value / 255 for value in bytes.fromhex(colour[1:])]
    red, green, blue = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(brightness, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_every_pair_has_a_colour_of_its_own_in_every_picture() -> None:
    assert len(set(PAIRS.values())) == len(ALL_PAIRS) == len(PAIRS)
    for name, pair in STRATEGIES.items():
        assert restore_regions.COLOURS[name] == PAIRS[str(pair)]
    points = [Point(group=f"{pair} {pair.strategy or ''}", label="1", mib=i, milliseconds=i)
              for i, pair in enumerate(ALL_PAIRS)]  # fmt: skip
    (axis,) = scatter_figure([*points, Point(group="no rings", label="1", mib=0, milliseconds=0)], "").axes
    assert [line.get_color() for line in axis.lines] == [*(PAIRS[str(pair)] for pair in ALL_PAIRS), "#000000"]
    assert {memory_saving.colour_of(f"{pair} {pair.strategy}") for pair in STRATEGIES.values()} == {
        PAIRS[str(pair)] for pair in STRATEGIES.values()
    }


def test_text_on_colours_can_be_read_on_light_and_on_dark_pages() -> None:
    for name in SERIES:  # labels of markers have the page's colour
        for scheme in (0, 1):
            assert contrast(THEME[name][scheme], THEME["paper"][scheme]) >= 4.5, (name, scheme)
    for colour, told in LEGEND.values():
        assert contrast(colour, ON_COLOUR) >= 4.5, told


def test_all_text_of_a_drawing_is_legible_at_the_width_of_the_documentation() -> None:
    (chosen,) = pictures.candidates((4,), (KEEP,))
    bars = step_bars(pictures.shape(), pictures.PROFILE, pictures.TOKENS, chosen)
    points = [Point(group="keep/keep", label="16", mib=1, milliseconds=1, chosen=True)]
    for figure in (drawing({"a": bars}, "a step"), scatter_figure(points, "a title", 2**20)):
        figure.canvas.draw()
        scale = DOCS_PIXELS / (figure.get_figwidth() * 72)
        for text in figure.findobj(Text):
            if text.get_text().strip() and text.get_visible():
                assert text.get_fontsize() * scale >= 12, text


def test_bars_too_narrow_for_letters_differ_by_a_pattern_that_the_legend_shows() -> None:
    def bar(kind: str, start: float, end: float) -> Span:
        return Span(
            direction="forward", name=f"{kind}0", kind=kind, chunk=0, lane="compute", start=start, end=end
        )

    wide, narrow = (
        [bar("C", 0.0, 0.5)],
        [bar(kind, 0.5 + 0.01 * i, 0.51 + 0.01 * i) for i, kind in enumerate("LWMC")],
    )
    figure = drawing({"a": [*wide, *narrow, bar("O", 0.6, 1.0)]}, "a step")
    solid, *patterns, unused = (patch.get_hatch() or "" for patch in figure.axes[0].patches)
    assert solid == unused == ""
    assert len(set(patterns)) == 4
    (legend,) = figure.legends
    shown = {
        text.get_text()[0]: patch.get_hatch() or ""
        for text, patch in zip(legend.texts, legend.get_patches(), strict=True)
    }
    assert shown == {"O": "", **dict(zip("LWMC", patterns, strict=True))}
    page = inline_svg(figure, "a step")
    used = set(re.findall(r"url\(#(\w+)\)", page))
    assert len(used) >= 3 and used <= set(re.findall(r' id="(\w+)"', page))


@pytest.mark.parametrize("name", ["memory_breakdown", "overlap_modelled_auto"])
def test_stored_pictures_are_drawn_from_stored_results(name: str, tmp_path: Path) -> None:
    for each in redraw.RESULTS.glob(f"{name}.*json"):
        shutil.copy(each, tmp_path)
    assert redraw.redraw(tmp_path) == [f"{name}.json"]
    picture = f"{name}.png"
    assert difference(tmp_path / picture, redraw.RESULTS / picture) < 2, "python bench/redraw.py"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("budget", [True, False])
def test_a_browser_shows_the_plan_readable_on_phones_and_desktops(
    budget: bool, tmp_path: Path, browser: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not budget:
        monkeypatch.setattr(pictures, "PLAN", pictures.PLAN[:-2])
    page = tmp_path / "plan.html"
    page.write_text(pictures.plan_page(), encoding="utf-8")
    browser.resize(390, 844, is_phone=True)
    browser.open(page)
    for width, is_phone, dark in ((390, True, False), (390, True, True), (1280, False, True)):
        browser.resize(width, 844, is_phone=is_phone, dark=dark)
        found = browser.run(MEASURE)
        assert browser.messages() == []
        assert (found["width"], found["scrolls"]) == (width, width)
        assert found["outside"] == [] and found["smallest"] >= 12, (width, dark)
        shown = browser.run("""return [...document.querySelectorAll('.picture')].map(each => {
            const svg = each.querySelector('svg').getBoundingClientRect();
            return [...each.querySelectorAll('text')].filter(text => {
              const box = text.getBoundingClientRect();
              return box.left < svg.left - 1 || box.right > svg.right + 1 || box.bottom > svg.bottom + 1 ||
                box.top < svg.top - 1; }).map(text => text.textContent); })""")
        assert shown == [[], []], width  # nothing is cut off in a drawing
    last = browser.run("return document.body.lastElementChild.textContent")
    assert re.fullmatch(r"pmoe\.MoELayer\(.*pipeline=\d+, memory_reuse='S\d'\)", last)
