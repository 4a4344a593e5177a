import torch

from workbench.hardware.allocations import allocations

CPU = torch.device("cpu")
MIB = 2**20


def test_what_stays_and_what_was_there_at_most_are_told_apart() -> None:
    def run() -> torch.Tensor:
        large = torch.ones(MIB, dtype=torch.float32)  # 4 MiB
        return large[: MIB // 4].clone()  # 1 MiB stays

    result, peak, kept = allocations(run, CPU)
    assert result.numel() == MIB // 4
    assert 5 * MIB <= peak < 5.1 * MIB and MIB <= kept < 1.1 * MIB


def test_tensors_that_were_there_before_do_not_count() -> None:
    before = torch.ones(MIB)
    _, peak, kept = allocations(lambda: before.add_(1), CPU)
    assert peak < 0.1 * MIB and kept < 0.1 * MIB
