"""The site's own Sphinx extension: formulas as MathML, which browsers draw, and nothing fetched from elsewhere."""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from workbench.report.executed import clean_html

OWN = "wb-own"
"""Class of the raw HTML that the site writes itself and has escaped already."""


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
    app.connect("doctree-read", _make_self_contained)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline_math(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(_mathml(writer, node.astext(), block=False))
    raise nodes.SkipNode


def _block_math(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{_mathml(writer, node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def _mathml(writer: HTML5Translator, formula: str, *, block: bool) -> str:
    """MathML, or the formula's source where the converter does not know it."""
    try:
        return str(tex2mathml(formula, as_block=block))
    except MathError:
        return f"<code>{writer.encode(formula)}</code>"


def _make_self_contained(app: Sphinx, document: nodes.document) -> None:
    for raw in list(document.findall(nodes.raw)):
        if "html" in raw["format"].split() and OWN not in raw["classes"]:
            raw.replace_self(nodes.raw("", clean_html(raw.astext()), format="html"))
    for image in list(document.findall(nodes.image)):
        address = image["uri"]
        if "://" in address or address.startswith("//"):
            link = nodes.reference("", image.get("alt") or address, refuri=address)
            inside_text = isinstance(image.parent, nodes.TextElement)
            image.replace_self(link if inside_text else nodes.paragraph("", "", link))
