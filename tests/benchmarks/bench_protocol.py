"""How often the protocol errs on this machine: equal arms called different, and a planted 10 % slow-down missed.

    python tests/benchmarks/bench_protocol.py [--runs 20] [--out FILE]

Each run is a whole ablation at the default protocol on the digits: fresh processes, interleaved rounds, no guard. Expected: "no
effect beyond noise" in at least 19 of 20 equal pairs, "reject" in at least 19 of 20 slowed ones. Takes about 10 minutes.
"""

import argparse
import json
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.experiment import Ablation, Arm, Guard, Protocol
from workbench.records.provenance import collect
from workbench.trainer.config import TrainConfig

HERE = Path(__file__).parent


def one_run(variant: Arm) -> dict[str, Any]:
    ablation = Ablation(
        name="protocol",
        title="Protocol",
        question="Does the protocol tell a planted difference from none?",
        hypothesis="It does.",
        workload=TrainConfig(global_batch=32, device="cpu"),
        baseline=Arm(name="A"),
        variants=[variant],
        protocol=Protocol(),
        guard=Guard(kind="none"),
    )
    with tempfile.TemporaryDirectory() as root:
        finding = ablation.run(root)
    assert finding.effects, finding.decisions[0].reason
    effect = finding.effects[0]
    measured = finding.arms[1].measurement
    assert measured is not None
    return {
        "decision": finding.decisions[0].decision,
        "ratio": round(effect.ratio, 4),
        "low": round(effect.interval.low, 4),
        "high": round(effect.interval.high, 4),
        "rounds": effect.rounds,
        "stop": effect.stop,
        "log_ratios": [round(r, 4) for r in effect.log_ratios],
        "planted": round(measured.extra.get("planted", 0.0), 3),
        "seconds": round(finding.duration_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(HERE)
    cases = {
        "equal": (Arm(name="A again"), "no effect beyond noise"),
        "10 % slower": (Arm(name="slowed", task="slowed:SlowedTask"), "reject"),
    }
    results: dict[str, Any] = {}
    load = os.getloadavg()
    for k in range(options.runs):
        for case, (variant, wanted) in cases.items():
            run = one_run(variant)
            results.setdefault(case, []).append(run)
            right = sum(r["decision"] == wanted for r in results[case])
            figure = f"{run['ratio']:.3f} [{run['low']:.3f}, {run['high']:.3f}]"
            print(
                f"{k + 1:2d} {case:12s} planted {run['planted']:.3f}, found {figure}, {run['rounds']:2d} rounds: "
                f"{run['decision']} ({right}/{k + 1} right)",
                flush=True,
            )
    summary = {
        case: f"{sum(r['decision'] == cases[case][1] for r in runs)}/{len(runs)} right"
        for case, runs in results.items()
    }
    print(summary)
    if options.out:
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"python tests/benchmarks/bench_protocol.py --runs {options.runs}",
            "cores": os.cpu_count(),
            "load": {"start": load, "end": os.getloadavg()},
            "provenance": collect(),
            "protocol": Protocol().model_dump(),
            "summary": summary,
            "runs": results,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
