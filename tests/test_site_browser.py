"""The site in a real browser, from ``file://``: nothing is fetched from anywhere, nothing complains, search works."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page

from tests.browser import chromium
from tests.runs import write_sample_runs
from tests.samples import EVIL
from workbench.report.site import build_site

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a folder with # and ü")
    write_sample_runs(folder / "runs")
    return build_site(folder / "runs", folder / "site").parent


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with chromium(tmp_path_factory.mktemp("profile"), viewport={"width": 1280, "height": 900}) as context:
        yield context


class Watched:
    """A page and everything it asked for or complained about."""

    def __init__(self, browser: BrowserContext) -> None:
        self.page: Page = browser.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", lambda request: self.complaints.append(f"failed: {request.url}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.complaints.append(m.text))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def assert_quiet(self) -> None:
        assert self.requests, "the page was not loaded"
        assert [url for url in self.requests if not url.startswith(("file://", "data:"))] == []
        assert self.complaints == []


@pytest.fixture
def watched(browser: BrowserContext) -> Iterator[Watched]:
    watched = Watched(browser)
    yield watched
    watched.page.close()


def test_every_page_opens_from_disk_without_a_request_or_a_complaint(site: Path, watched: Watched) -> None:
    paths = sorted(site.rglob("*.html"))
    assert len(paths) >= 10
    for path in paths:
        watched.page.goto(path.as_uri())
        watched.page.wait_for_load_state("networkidle")
    watched.assert_quiet()


def test_a_reader_gets_from_the_list_to_a_finding_and_sees_its_figures(site: Path, watched: Watched) -> None:
    watched.page.goto((site / "index.html").as_uri())
    watched.page.get_by_role("link", name="Mixed precision").first.click()
    assert watched.page.locator("h1").inner_text().startswith("Mixed precision")
    figures = watched.page.locator("figure.wb-plot img:visible")
    assert figures.count() == 5
    for k in range(5):
        assert figures.nth(k).evaluate("picture => picture.naturalWidth") > 0
    watched.assert_quiet()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_follow_the_colour_scheme(site: Path, watched: Watched, scheme: str) -> None:
    watched.page.emulate_media(color_scheme=scheme)
    watched.page.goto((site / "findings" / "20261201-093000-02_mixed_precision-0002.html").as_uri())
    sources = watched.page.locator("figure.wb-plot img:visible").evaluate_all("all => all.map(p => p.src)")
    assert len(sources) == 5 and all(f"-{scheme}.svg" in source for source in sources)
    watched.assert_quiet()


def test_a_hostile_name_is_shown_as_text_and_runs_nothing(site: Path, watched: Watched) -> None:
    watched.page.goto((site / "findings" / "20261201-100000-04_evil-0003.html").as_uri())
    assert watched.page.locator("h1").inner_text().startswith(EVIL)
    assert watched.page.locator("img[src='x']").count() == 0
    watched.assert_quiet()


def test_search_works_from_disk(site: Path, watched: Watched) -> None:
    watched.page.goto((site / "index.html").as_uri())
    watched.page.keyboard.press("Control+k")
    watched.page.keyboard.type("underflow")
    watched.page.keyboard.press("Enter")
    hit = watched.page.locator("#search-results a", has_text="Claims").first
    hit.wait_for(timeout=20_000)
    hit.click()
    assert watched.page.locator("h1").inner_text().startswith("Claims")
    watched.assert_quiet()


def test_pages_fit_a_narrow_screen(site: Path, watched: Watched) -> None:
    watched.page.set_viewport_size({"width": 390, "height": 800})
    for name in ("index", "claims", "runs", "findings/20261201-093000-02_mixed_precision-0002"):
        watched.page.goto((site / f"{name}.html").as_uri())
        widths = watched.page.locator("article, section.wb-card, figure, h1, p").evaluate_all(
            "all => all.map(e => e.getBoundingClientRect().left + e.scrollWidth)"
        )
        assert max(widths) <= 390, name
    watched.assert_quiet()
