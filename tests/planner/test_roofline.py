"""The efficiencies that stand for a device which is not there, against public measurements of others."""

import csv
import statistics
from pathlib import Path

from workbench.hardware.probe import datasheet
from workbench.planner.roofline import MATRIX_EFFICIENCY

ROWS = list(csv.DictReader((Path(__file__).parents[1] / "data" / "achievable_matmul.csv").open()))


def test_the_matrix_efficiency_is_the_median_of_what_nvidias_parts_reach() -> None:
    parts = [r for r in ROWS if not r["gpu"].startswith("MI")]
    errors = {r["gpu"]: MATRIX_EFFICIENCY["datasheet"] / float(r["efficiency"]) - 1 for r in ROWS}
    print("\n".join(f"{gpu:10} {error:+.1%}" for gpu, error in errors.items()))
    assert abs(statistics.median(errors[r["gpu"]] for r in parts)) < 0.02


def test_the_peaks_are_those_that_the_table_divides_by() -> None:
    for row in ROWS:
        entry = datasheet(f"NVIDIA {row['gpu']}")
        if entry:  # the table has parts that ours does not
            assert abs(float(row["peak_spec"]) / entry["bf16"] - 1) < 0.01
    assert sum(datasheet(r["gpu"]) is not None for r in ROWS) >= 5
