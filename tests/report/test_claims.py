from pathlib import Path

import pytest
from pydantic import ValidationError

from workbench.report.claims import VERDICTS, Claim, load_claims

ROW = {"id": "C1", "stage": "precision", "claim": "c", "known": "k", "sources": ["s"]}


def test_ledger_holds_the_eighteen_claims_in_order() -> None:
    assert [claim.id for claim in load_claims()] == [f"C{i}" for i in range(1, 19)]


def test_every_verdict_is_an_allowed_word_and_every_settled_one_names_a_finding_that_has_a_notebook() -> None:
    notebooks = {p.stem for p in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb")}
    for claim in load_claims():
        assert claim.verdict in VERDICTS
        if claim.verdict != "open":
            assert claim.finding in notebooks


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "refuted"},
        {"verdict": "refuted", "finding": "02_mixed_precision"},
        {"verdict": "not testable here", "because": "needs two nodes"},
        {"verdict": "proven", "finding": "02_mixed_precision", "because": "b"},
        {"finding": "02_mixed_precision"},
        {"id": "claim 1"},
        {"sources": []},
    ],
)
def test_a_row_that_breaks_the_rules_is_rejected(change: dict) -> None:
    Claim(**ROW)
    with pytest.raises(ValidationError):
        Claim(**{**ROW, **change})


def test_an_id_that_occurs_twice_is_rejected(tmp_path: Path) -> None:
    row = '[[claim]]\nid = "C1"\nstage = "s"\nclaim = "c"\nknown = "k"\nsources = ["s"]\n'
    ledger = tmp_path / "claims.toml"
    ledger.write_text(row * 2)
    with pytest.raises(ValueError, match="C1"):
        load_claims(ledger)
