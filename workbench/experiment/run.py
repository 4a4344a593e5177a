"""Runs an ablation: check, predict, start the arms, take turns, guard, decide, record."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError

from workbench.data.sources import check_source
from workbench.errors import Refused, nearest
from workbench.experiment.ablation import Ablation, Arm
from workbench.experiment.arms import ArmEnded, ArmProcess
from workbench.experiment.decision import decide, effects, guard_verdicts
from workbench.experiment.finding import Finding, PredictionCheck
from workbench.experiment.measured import MeasuredArm
from workbench.experiment.prediction import check_predictions, predict_arms
from workbench.experiment.progress import REDRAW_S, LiveProgress
from workbench.experiment.statistics import look_rounds, precise_enough
from workbench.hardware.facts import DeviceFacts, cpu_count, detect
from workbench.models.config import check_model
from workbench.records.run import Run
from workbench.trainer.config import TrainConfig


def predict(ablation: Ablation) -> list[PredictionCheck]:
    """The planner's expectation of each arm; runs nothing.

    Raises:
        Refused: the ablation asks for something that is not there.
    """
    configs, facts = check(ablation)
    return predict_arms(ablation.arms, configs, facts)


def run_ablation(ablation: Ablation, root: Path | str = "") -> Finding:
    """Measure an ablation and record its finding.

    Raises:
        Refused: the ablation asks for something that is not there; nothing was measured.
        KeyboardInterrupt: after all arms were stopped; the record says so.
    """
    configs, facts = check(ablation)
    run = Run.current(ablation.name, ablation.workload.model_dump(mode="json"), root)
    try:
        finding = _Experiment(ablation, configs, facts, run).finding()
        run.save_finding(finding.model_dump(mode="json"))
    except KeyboardInterrupt:
        run.finish("interrupted", "interrupted by the user")
        raise
    except Refused as refusal:
        run.finish("refused", str(refusal))
        raise
    except BaseException as error:
        run.finish("failed", f"{type(error).__name__}: {error}")
        raise
    failed, said = finding.trouble
    run.finish("failed" if failed else "completed", said, exit_code=1 if said else 0)
    return finding


def check(ablation: Ablation) -> tuple[dict[str, TrainConfig], DeviceFacts]:
    """Every arm's whole configuration, and the device's facts; refuses what could not run."""
    names = [arm.name for arm in ablation.arms]
    if repeated := [n for n in names if names.count(n) > 1]:
        raise Refused("arm name", repeated[0], allowed="one arm per name", fix="rename one of them")
    configs = {arm.name: arm_config(ablation.workload, arm) for arm in ablation.arms}
    for arm in ablation.arms:
        config = configs[arm.name]
        check_model(config.model)
        check_source(config.data)
        if arm.task.startswith("__main__") or ":" not in arm.task:
            raise Refused(
                f"task of arm {arm.name!r}",
                arm.task,
                allowed="package.module:Class",
                fix="move the class to a file: arms run in processes of their own that cannot see the notebook",
            )
    return configs, detect(ablation.workload.device)


def arm_config(workload: TrainConfig, arm: Arm) -> TrainConfig:
    """The workload with an arm's settings over it; nested fields are merged."""
    if "device" in arm.settings:
        raise Refused(
            f"device of arm {arm.name!r}",
            arm.settings["device"],
            allowed="one device for all arms: a finding speaks of one",
            fix="set it in the workload, and run one ablation per device",
        )
    for field in arm.settings:
        if field not in TrainConfig.model_fields:
            raise Refused(
                f"setting of arm {arm.name!r}",
                field,
                allowed="a field of TrainConfig",
                fix=nearest(field, TrainConfig.model_fields),
            )
    try:
        config = TrainConfig(**_merge(workload.model_dump(), arm.settings))
        config.model_dump_json()
        return config
    except PydanticSerializationError as error:
        raise Refused(
            f"a setting of arm {arm.name!r} cannot be sent to the arm's process ({error})",
            allowed="numbers, strings, lists and mappings",
            fix="name a function as 'package.module:function'; turn an array's number into int or float",
        ) from None
    except Refused as refusal:
        raise Refused(f"arm {arm.name!r}: {refusal}") from None


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged


class _Experiment:
    """One run of an ablation, from the first process to the finding."""

    def __init__(self, ablation: Ablation, configs: dict[str, TrainConfig], facts: DeviceFacts, run: Run) -> None:
        self.ablation, self.facts, self.run = ablation, facts, run
        self.protocol = ablation.protocol
        self.process_spread = self.protocol.spread_on(facts.kind)
        self.predictions = predict_arms(ablation.arms, configs, facts)
        self.arms = [
            MeasuredArm(arm, configs[arm.name], self._process(arm, configs[arm.name])) for arm in ablation.arms
        ]
        self.baseline, self.variants = self.arms[0], self.arms[1:]
        self.block_steps = self.protocol.block_steps
        self.stop = "rounds"
        self.rounds = 0
        self._guard_state: tuple[float | None, str] = None, "guard"

    def _process(self, arm: Arm, config: TrainConfig) -> ArmProcess:
        number = self.ablation.arms.index(arm)
        log = self.run.artifact(f"arms/{number}.log")
        return ArmProcess(arm, config, self.facts, log, self.protocol.arm_timeout_s)

    def finding(self) -> Finding:
        began = time.monotonic()
        with LiveProgress(self.ablation.name, self.run) as live, ExitStack() as stack:
            self.live = live
            for arm in self.arms:
                stack.callback(arm.process.stop)
            self._start()
            self._attempt(self.baseline, self._lengthen_blocks)
            self._take_turns()
            self._guard()
            done = [arm for arm in self.arms if arm.status == "completed"]
            live.finish(f"{len(done)} of {len(self.arms)} arms, {self.rounds} rounds")
        return self._conclude(time.monotonic() - began)

    def _start(self) -> None:
        running = self._living()
        self.live.update(None, f"starting {len(running)} arms, each in its own process")
        if not self.protocol.alive:
            return
        for arm in running:
            arm.process.start(self.protocol.warmup_steps)
        for arm in running:
            self.live.update(None, f"{arm.name} · starting and warming up")
            self._attempt(arm, arm.process.wait_ready)

    def _take_turns(self) -> None:
        """Rounds of one block per arm, in alternating order, until the interval is narrow enough or rounds or budget end."""
        deadline = time.monotonic() + self.protocol.budget_s
        looks = look_rounds(self.protocol.max_rounds)
        for number in range(1, self.protocol.max_rounds + 1):
            order = self._living()
            if self.baseline not in order:
                return
            for arm in order if number % 2 else order[::-1]:
                self.live.update(
                    self._seconds_left(number, arm), f"{arm.name} · round {number}/{self.protocol.max_rounds}"
                )
                self._attempt(arm, partial(self._block, arm, number))
            self.rounds = number
            if number in looks and self._precise():
                self.stop = "precise"
                return
            if time.monotonic() > deadline:
                self.stop = "budget"
                return

    def _lengthen_blocks(self) -> None:
        """Steps per block, the same for all arms, so that the baseline's lasts ``min_block_s``; judged by one block of it."""
        if self.baseline.status == "completed" and self.protocol.min_block_s:
            step_time = self._ask_block(self.baseline)["step_time"]
            self.block_steps = max(self.block_steps, math.ceil(self.protocol.min_block_s / step_time))

    def _block(self, arm: MeasuredArm, number: int) -> None:
        arm.blocks[number] = block = self._ask_block(arm)
        self.run.log(event="block", arm=arm.name, round=number, steps=self.block_steps, **block)

    def _ask_block(self, arm: MeasuredArm) -> dict[str, Any]:
        with self._alive(arm, self.protocol.warmup_steps):
            return arm.process.block(self.block_steps)

    @contextmanager
    def _alive(self, arm: MeasuredArm, warmup_steps: int) -> Iterator[None]:
        """The arm's process, started here and stopped after where arms do not stay alive."""
        if not self.protocol.alive:
            arm.process.start(warmup_steps)
            arm.process.wait_ready()
        yield
        if not self.protocol.alive:
            arm.process.stop()

    def _precise(self) -> bool:
        measured = [self.baseline.log_ratios(v) for v in self.variants if v.status == "completed"]
        return bool(measured) and all(
            precise_enough([r for _, r in ratios], self.protocol.confidence, self.protocol.effect, self.process_spread)
            for ratios in measured
        )

    def _guard(self) -> None:
        guard = self.ablation.guard
        if guard.kind == "none" or self.baseline.status != "completed":
            return
        with ThreadPoolExecutor(self._guards_at_once()) as pool:
            for k in range(guard.seeds):
                self._guard_seed(k, pool)

    def _guards_at_once(self) -> int:
        """Guard runs are not timed, so on a CPU as many run side by side as there are cores for."""
        alone = self.facts.kind != "cpu" or not self.protocol.alive
        return 1 if alone else max(cpu_count() // max(self.facts.threads, 1), 1)

    def _guard_seed(self, k: int, pool: ThreadPoolExecutor) -> None:
        """Every arm from one seed. Threads wait for the arms; this one draws, since a notebook's output belongs to its cell."""
        seed = self.ablation.workload.seed + k
        runs = [pool.submit(self._attempt, arm, partial(self._guard_run, arm, seed, k)) for arm in self._living()]
        try:
            while wait(runs, timeout=REDRAW_S).not_done:
                self.live.update(*self._guard_state)
            for run in runs:
                run.result()
        except BaseException:
            for arm in self.arms:
                arm.process.stop()  # so that no thread waits any longer
            raise

    def _guard_run(self, arm: MeasuredArm, seed: int, k: int) -> None:
        guard = self.ablation.guard

        def on_step(step: int, values: dict[str, float]) -> None:
            if k == 0:
                for series, value in values.items():
                    arm.trajectories.setdefault(series, []).append(value)
            label = f"{arm.name} · guard, seed {k + 1}/{guard.seeds} · step {step + 1}/{guard.steps}"
            self._guard_state = self._guard_seconds_left(arm, k, step), label

        with self._alive(arm, warmup_steps=0):
            result = arm.process.guard_run(seed, guard.steps, on_step)
        arm.guard_runs.append({"seed": seed, **result})
        self.run.log(event="guard", arm=arm.name, seed=seed, **result)

    def _attempt(self, arm: MeasuredArm, action: Callable[[], None]) -> None:
        """Do something with an arm; however the arm ends is its result, and the others go on."""
        try:
            action()
        except ArmEnded as ended:
            arm.status, arm.error = ended.status, ended.error
            arm.process.stop()
            self.run.log(event="arm ended", arm=arm.name, status=ended.status, error=ended.error)

    def _living(self) -> list[MeasuredArm]:
        return [arm for arm in self.arms if arm.status == "completed"]

    def _seconds_left(self, number: int, now: MeasuredArm) -> float | None:
        living = self._living()
        if any(not arm.blocks for arm in living):
            return None
        rounds = self.protocol.max_rounds - number + 1
        per_round = sum(arm.step_seconds * self.block_steps for arm in living)
        return rounds * per_round + self._guard_seconds_left(living[0], 0, 0)

    def _guard_seconds_left(self, now: MeasuredArm, k: int, step: int) -> float:
        guard = self.ablation.guard
        if guard.kind == "none":
            return 0.0
        living = self._living()
        position = living.index(now) if now in living else 0
        each = [arm.step_seconds * guard.steps for arm in living]
        left = (guard.seeds - k - 1) * sum(each) + sum(each[position:]) - now.step_seconds * step
        return max(left, 0.0) / self._guards_at_once()

    def _conclude(self, duration_s: float) -> Finding:
        a = self.ablation
        results = [arm.result() for arm in self.arms]
        measured = effects(self.baseline, self.variants, self.protocol, self.process_spread, self.stop)
        guards = guard_verdicts(self.baseline, self.variants, a.guard)
        return Finding(
            name=a.name,
            title=a.title,
            question=a.question,
            hypothesis=a.hypothesis,
            claims=a.claims,
            created=datetime.now(UTC),
            device=self.facts.name,
            device_facts=self.facts.model_dump(mode="json"),
            workload=a.workload.model_dump(mode="json"),
            synthetic_data=any(check_source(arm.config.data).synthetic for arm in self.arms),
            baseline=self.baseline.name,
            arms=results,
            effects=measured,
            guards=guards,
            predictions=check_predictions(self.predictions, results),
            decisions=decide(self.variants, measured, guards, a.guard),
            protocol=a.protocol.model_dump(mode="json")
            | {
                "block_steps": self.block_steps,
                "process_spread": self.process_spread,
                "guard": a.guard.model_dump(mode="json"),
            },
            limits=a.limits,
            duration_s=duration_s,
        )
