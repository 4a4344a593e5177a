"""The claims ledger: what the case study says, what is known about it, and what our findings made of it.

The rows live in ``claims.toml``. A verdict is a person's reading of a finding, so it is written there by hand, and
the type refuses one that does not name the finding it comes from.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workbench.experiment.finding import Finding

Verdict = Literal["open", "reproduced", "reproduced elsewhere", "simulated", "refuted", "not testable here"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
LEDGER = Path(__file__).with_name("claims.toml")


class Claim(BaseModel):
    """One row of the ledger."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^C[1-9][0-9]*$")
    stage: str
    claim: str
    """The case study's claim, in our words."""
    known: str
    """What public sources say, and what a finding must show."""
    sources: list[str] = Field(min_length=1)
    verdict: Verdict = "open"
    finding: str = ""
    """Name of the notebook whose finding gave the verdict, such as ``02_mixed_precision``."""
    because: str = ""
    """What was found, on what device and scale; for ``not testable here``, what is missing."""

    @model_validator(mode="after")
    def _verdict_has_its_grounds(self) -> "Claim":
        if self.verdict == "open" and (self.finding or self.because):
            raise ValueError(f"{self.id} is open, so it cannot name a finding or a reason yet")
        if self.verdict != "open" and not (self.finding and self.because):
            raise ValueError(f"{self.id} is {self.verdict!r} and must name its finding and say why")
        return self


def load_claims(path: Path = LEDGER) -> list[Claim]:
    """All rows in the ledger's order.

    Raises:
        ValueError: a row breaks the ledger's rules, or an id occurs twice.
    """
    claims = [Claim(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["claim"]]
    ids = [claim.id for claim in claims]
    if repeated := {i for i in ids if ids.count(i) > 1}:
        raise ValueError(f"claims ledger holds {sorted(repeated)} more than once")
    return claims


def findings_by_claim(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """The findings that speak to each claim, by the claim ids that they carry."""
    speaking: dict[str, list[Finding]] = {}
    for finding in findings:
        for claim in finding.claims:
            speaking.setdefault(claim, []).append(finding)
    return speaking
