"""The site's content and its building; how it behaves in a browser stands in tests/test_site_browser.py."""

import html
import re
from pathlib import Path

import pytest

from tests.runs import write_run, write_sample_runs
from tests.samples import EVIL, sample_finding
from workbench.errors import Refused
from workbench.records.query import scan
from workbench.report.collection import gather, slug
from workbench.report.pages import markdown_text
from workbench.report.site import build_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write_sample_runs(folder / "runs")
    return build_site(folder / "runs", folder / "site").parent


def test_first_page_shows_each_finding_with_decision_interval_guard_tier_and_device(site: Path) -> None:
    page = (site / "index.html").read_text()
    finding = sample_finding()
    effect = finding.effects[0]
    said = [finding.question, finding.device, "measured", "adopt", "void: guard failed", "inconclusive", "oom"]
    said += [f"{effect.ratio:.2f}×", f"[{effect.interval.low:.2f}, {effect.interval.high:.2f}]"]
    assert all(text in page for text in said)


def test_earlier_findings_stand_under_history_and_point_to_the_latest(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert page.index("0002.html") < page.index("History") < page.index("0001.html")
    old = (site / "findings" / "20261128-093000-02_mixed_precision-0001.html").read_text()
    assert "superseded by" in old and "0002.html" in old


def test_finding_page_holds_summary_figures_numbers_and_the_executed_notebook(site: Path) -> None:
    page = (site / "findings" / "20261201-093000-02_mixed_precision-0002.html").read_text()
    finding = sample_finding()
    said = [finding.hypothesis, *finding.limits, "Prediction error", "roofline formula", "kept text"]
    assert all(text in page for text in said)
    assert "ablation.run()" in re.sub("<[^>]+>", "", page)
    assert page.count("<figure") == 5
    assert "<math" in page
    assert "widget-state" not in page


def test_runs_page_tells_what_became_of_every_run(site: Path) -> None:
    page = (site / "runs.html").read_text()
    assert "killed" in page and "arm ended by signal 9" in page
    assert "broken" in page and "run.json cannot be read" in page
    assert html.escape(EVIL) in page
    assert "A notebook" in next((site / "notebooks").glob("*.html")).read_text()


def test_claims_page_lists_all_claims_and_links_findings_that_speak_to_them(site: Path) -> None:
    page = (site / "claims.html").read_text()
    assert all(f'id="C{k}"' in page for k in range(1, 19))
    assert "findings/20261201-093000-02_mixed_precision-0002.html" in page


def test_hostile_names_appear_as_text_only(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert EVIL not in path.read_text()


def test_an_unreadable_finding_is_told_and_hides_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path, "20261201-093000-02_x-0001")
    (run.dir / "finding.json").write_text('{"name": "02')
    write_run(tmp_path, "20261201-093001-02_x-0002", sample_finding())
    pages, rows = gather(scan(tmp_path))
    assert [page.run.id for page in pages] == ["20261201-093001-02_x-0002"]
    assert "finding.json cannot be read" in rows[1].finding_trouble


def test_latest_is_told_apart_by_notebook_device_and_tier(tmp_path: Path) -> None:
    others = [{}, {"device": "Another"}, {"tier": "simulated"}, {"name": "03_x"}]
    for k, other in enumerate(others):
        write_run(tmp_path, f"20261201-09300{k}-02_x-000{k}", sample_finding(**other))
    pages, _ = gather(scan(tmp_path))
    assert all(page.is_latest for page in pages)


def test_an_empty_runs_folder_gives_a_page_that_says_how_to_make_findings(tmp_path: Path) -> None:
    page = build_site(tmp_path / "nothing", tmp_path / "site").read_text()
    assert "no findings" in page and "make findings" in page


def test_a_site_is_replaced_whole_and_anything_else_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "site"
    build_site(tmp_path / "runs", out)
    (out / "left_over.html").touch()
    build_site(tmp_path / "runs", out)
    assert not (out / "left_over.html").exists()
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").touch()
    with pytest.raises(Refused, match="thesis"):
        build_site(tmp_path / "runs", other)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["site", "thesis"]


def test_names_that_differ_get_addresses_that_differ() -> None:
    names = ["a b", "a-b", "a/b", "ä", "ö", "", "a" * 200, "a" * 201]
    assert len({slug(name) for name in names}) == len(names)


def test_markdown_text_escapes_every_sign_that_means_something() -> None:
    assert markdown_text("[a](b) `c`\n# d") == r"\[a\]\(b\) \`c\` \# d"
