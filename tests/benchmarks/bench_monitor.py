"""What the gradient monitor costs, as a ratio of step times with and without it; turns are taken step by step.

    PYTHONPATH=. python tests/benchmarks/bench_monitor.py --model vit-micro --every 20 --rounds 40

Each round times ``every`` steps of one training run with the monitor and as many without, in alternating order. Printed:
the mean log-ratio of the rounds as a percentage, with its 95 % interval; and the host's own time inside the monitor, which
on a CPU is all there is, as a share of the steps without it.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from scipy import stats
from torch.nn import functional as F

from workbench.diagnose.gradients import GradientMonitor
from workbench.models.build import build_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-nano")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-updates", action="store_true", help="leave out the update-to-weight ratio")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Processor time on a CPU: other programs' turns are not ours.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    torch.manual_seed(0)
    model = build_model(options.model, num_classes=10, image_size=options.image_size, in_channels=3).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    images = torch.randn(options.batch, 3, options.image_size, options.image_size, device=device)
    labels = torch.randint(10, (options.batch,), device=device)
    monitor = GradientMonitor(model, every=options.every, updates=not options.no_updates)

    inside: list[float] = []

    def timed(call: Callable[[int], None], step: int) -> None:
        began = clock()
        call(step)
        inside.append(clock() - began)

    def block(monitored: bool) -> float:
        began = clock()
        for step in range(options.every):
            F.cross_entropy(model(images), labels).backward()
            if monitored:
                timed(monitor.before_clipping, step)
            optimizer.step()
            if monitored:
                timed(monitor.after_update, step)
            optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - began

    block(True), block(False)
    inside.clear()
    ratios, plain = [], []
    for number in range(options.rounds):
        times = {monitored: block(monitored) for monitored in ((True, False) if number % 2 else (False, True))}
        ratios.append(math.log(times[True] / times[False]))
        plain.append(times[False] / options.every)
    mean = statistics.fmean(ratios)
    half = stats.t.ppf(0.975, len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    low, high = (100 * math.expm1(x) for x in (mean - half, mean + half))
    print(
        f"{options.model}, batch {options.batch}, {device}: step {1e3 * statistics.median(plain):.1f} ms; monitor every "
        f"{options.every} steps costs {100 * math.expm1(mean):+.2f} % [{low:+.2f}, {high:+.2f}] ({options.rounds} rounds); "
        f"inside it {100 * sum(inside) / (sum(plain) * options.every):.2f} %"
    )


if __name__ == "__main__":
    main()
