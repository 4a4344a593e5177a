import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_compile_for_hopper_without_one_and_spill_less_than_the_bound(tmp_path):
    """Every kernel for blocks of 128, and for blocks of 64 without partial ones; the program alone compiles all."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "workbench.kernels.resources", "--head-dims", "64", "128", *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for options in (["--blocks", "128"], ["--blocks", "64", "--variants", "whole"])
    ]
    tables = []
    for run in runs:
        table, errors = run.communicate()
        assert run.returncode == 0, table + errors
        tables.append(table.splitlines())
    three_kernels, two_head_dims, whole_cut_and_lowered = 3, 2, 3
    assert [len(table) for table in tables] == [
        three_kernels * two_head_dims * whole_cut_and_lowered,
        three_kernels * two_head_dims,
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_configuration_that_spills_is_found(tmp_path):
    """The negative control: a tile that cannot fit in the registers of its warps."""
    program = (
        "from workbench.kernels import resources, triton_common as c\n"
        "c.CONFIGS.clear()\n"
        "tile = c.Tile(128, 128, 4, 2)\n"
        "c.CONFIGS[128, 128] = c.Config(tile, tile, tile)\n"
        "print(next(r.spilled_bytes for r in resources.report() if r.kernel == 'dkdv'))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1000
