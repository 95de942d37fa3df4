"""Tests the documentation as a browser draws it: no raw Markdown, no broken words, no
clipped text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import flaws, needs_browser

ROOT = Path(__file__).parents[1]
Site = tuple[Path, subprocess.CompletedProcess[str]]
pytestmark = [pytest.mark.slow, pytest.mark.one_core]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return folder, done


def test_documentation_site_builds_in_strict_mode(site: Site) -> None:
    assert site[1].returncode == 0, site[1].stderr


@needs_browser
def test_documentation_pages_have_no_flaws_in_wide_and_narrow_windows(
    site: Site, tmp_path: Path
) -> None:
    pages = [page for page in sorted(site[0].rglob("*.html")) if page.name != "404.html"]
    assert len(pages) > 20
    found = flaws(pages, tmp_path)
    assert not found, "\n".join(found)


# Fragments of a page, each with the flaw that is visible in it.
FLAWS = [
    ("<p>- **[Own data](data.md)**</p>", "a list item in raw Markdown: - **[Own data]"),
    ("<p>text\n- item</p>", "a list item in raw Markdown: text - item"),
    ("<p>see [data](data.md)</p>", "a link in raw Markdown"),
    ("<p>one   1\ntwo   2</p>", "columns in raw Markdown"),
    ("<p>a `name`</p>", "code in raw Markdown"),
    ("<p>the last &lt;answer></p>", "a tag in raw Markdown"),
    ("<p>one &amp;lt; two</p>", "an entity in raw Markdown"),
    (
        "<div style='width:30px'><code style='word-break:break-all'>max_lag</code></div>",
        "a broken word: max_lag",
    ),
    (
        "<div style='width:80px'><code>train --from-step</code></div>",
        "a broken word: --from-step",
    ),
    (
        "<div style='width:30px;overflow:hidden;white-space:nowrap'>long title</div>",
        "clipped: long title",
    ),
    ("<div style='width:2000px'>wide</div>", "the page scrolls sideways"),
    ("<div style='position:relative;left:-50px'>left</div>", "outside: left"),
    ("<svg width=50><text>a long title</text></svg>", "clipped in a figure: a long title"),
    (
        "<div class=js-plotly-plot><svg><text y=20>one</text><text y=20 x=3>two</text></svg>",
        "overlapping labels: one / two",
    ),
    ("<img src=gone.png>", "missing picture: gone.png"),
    ("<script src=http://a.invalid/x.js></script>", "loaded from the network"),
]


@needs_browser
def test_browser_flaws_finds_each_kind_of_flaw(tmp_path: Path) -> None:
    start = "<!doctype html><meta charset=utf-8><body style='margin:0'><article>"
    pages = [tmp_path / f"{number}.html" for number in range(len(FLAWS))]
    for page, (body, _) in zip(pages, FLAWS, strict=True):
        page.write_text(start + body)
    found = flaws(pages, tmp_path, widths=[800])
    for page, (_, flaw) in zip(pages, FLAWS, strict=True):
        assert any(f"/{page.name} at 800 px: {flaw}" in text for text in found), (flaw, found)
