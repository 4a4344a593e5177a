"""The site: findings, claims and runs as HTML that opens from ``file://`` and asks nothing of any server."""

import io
import shutil
import tempfile
from datetime import datetime
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from workbench import __version__
from workbench.errors import Refused
from workbench.records.query import scan
from workbench.report.pages import write_sources

HERE = Path(__file__).parent
MARKER = ".workbench-site"
"""A file in every folder built here; only such a folder, or an empty one, is ever replaced."""


def build_site(root: Path = Path("runs"), out: Path = Path("site")) -> Path:
    """Build the site from the run records below ``root`` into ``out``, which it replaces whole when it is done.

    Executed notebooks are shown as they ran; nothing is executed again.

    Returns:
        The page to open.

    Raises:
        Refused: ``out`` holds something else than a site, or cannot be written.
    """
    root, out = Path(root), Path(out).absolute()
    if out.exists() and not _replaceable(out):
        raise Refused(
            "folder for the site", str(out), allowed="a new or empty folder, or a site built before", fix="name another"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch_folder = tempfile.TemporaryDirectory(dir=out.parent, prefix=".site-")
    except OSError as error:
        raise Refused("folder for the site", str(out), allowed=f"one that can be written ({error.strerror})") from None
    with scratch_folder as scratch:
        source, built = Path(scratch, "source"), Path(scratch, "html")
        shutil.copytree(HERE / "static", source / "static")
        write_sources(scan(root), root, source)
        _run_sphinx(source, built)
        (built / MARKER).touch()
        _swap(built, out, Path(scratch, "replaced"))
    return out / "index.html"


def _replaceable(out: Path) -> bool:
    return out.is_dir() and ((out / MARKER).exists() or not any(out.iterdir()))


def _swap(built: Path, out: Path, aside: Path) -> None:
    """Two renames: a reader finds the old site or the new one, for an instant neither, never a mixture."""
    if out.exists():
        out.rename(aside)
    try:
        built.rename(out)
    except OSError:
        if aside.exists():
            aside.rename(out)
        raise


def _run_sphinx(source: Path, built: Path) -> None:
    warnings = io.StringIO()
    with patch_docutils(), docutils_namespace():
        app = Sphinx(
            source,
            None,
            built,
            source / ".doctrees",
            "html",
            _configuration(),
            status=None,
            warning=warnings,
            freshenv=True,
        )
        app.build(force_all=True)
    if app.statuscode:
        raise RuntimeError(f"Sphinx could not build the site:\n{warnings.getvalue()}")
    # A template that the theme leaves among its static files; opened as a page, it asks for files that do not exist.
    (built / "_static" / "webpack-macros.html").unlink(missing_ok=True)


def _configuration() -> dict[str, object]:
    return {
        "project": "Workbench",
        "copyright": f"Workbench {__version__}, built {datetime.now():%Y-%m-%d %H:%M}",
        "html_title": "Workbench findings",
        "extensions": ["myst_nb", "workbench.report.sphinx_ext"],
        "exclude_patterns": ["fragments"],
        "nb_execution_mode": "off",
        "nb_merge_streams": True,
        # Both defaults load scripts from elsewhere. Formulas are MathML; panels are figures here.
        "nb_ipywidgets_js": {},
        "html_math_renderer": "mathml",
        "myst_update_mathjax": False,
        "myst_enable_extensions": ["amsmath", "dollarmath"],
        "suppress_warnings": ["myst", "mystnb", "toc"],
        "html_theme": "pydata_sphinx_theme",
        "html_static_path": ["static"],
        "html_css_files": ["workbench.css"],
        "html_use_index": False,
        "html_copy_source": False,
        "html_show_sourcelink": False,
        "html_show_sphinx": False,
        # A summary under each hit would be fetched, which browsers refuse for file://.
        "html_show_search_summary": False,
        "html_context": {"default_mode": "auto"},
        "html_sidebars": {"**": []},
        "html_theme_options": {
            "logo": {"text": "Workbench"},
            "navbar_end": ["theme-switcher"],
            "navbar_persistent": ["search-button"],
            "secondary_sidebar_items": ["page-toc"],
            "footer_start": ["copyright"],
            "footer_end": [],
            "show_prev_next": False,
            "navigation_with_keys": False,
            "pygments_light_style": "a11y-high-contrast-light",
            "pygments_dark_style": "a11y-high-contrast-dark",
        },
    }
