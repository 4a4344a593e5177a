import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_configuration_compiles_for_hopper_without_one_and_spills_less_than_the_bound(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "workbench.kernels.resources", "--block", block],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for block in ("64", "128")
    ]
    tables = []
    for run in runs:
        table, errors = run.communicate()
        assert run.returncode == 0, table + errors
        tables.append(table.splitlines())
    four_kernels_three_head_dims_two_variants, lowered = 4 * 3 * 2, 3 * 2
    assert [len(table) for table in tables] == [
        four_kernels_three_head_dims_two_variants,
        four_kernels_three_head_dims_two_variants + lowered,
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_configuration_that_spills_is_found(tmp_path):
    """The negative control: a tile that cannot fit in the registers of its warps."""
    program = (
        "from workbench.kernels import resources, triton_common as c\n"
        "c.CONFIGS.clear()\n"
        "tile = c.Tile(128, 128, 4, 2)\n"
        "c.CONFIGS[128, 128] = c.Config(tile, tile, tile, tile)\n"
        "print(next(r.spilled_bytes for r in resources.report() if r.kernel == 'dkdv'))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1000
