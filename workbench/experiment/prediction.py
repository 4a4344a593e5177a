"""What the planner expects of each arm, written down before anything runs and held against the measurement after."""

from collections.abc import Mapping

from workbench.data.sources import check_source
from workbench.experiment.ablation import TRAIN_TASK, Arm
from workbench.experiment.attention import ATTENTION_TASK, predict_patterns
from workbench.experiment.finding import ArmResult, PredictionCheck
from workbench.hardware.facts import DeviceFacts
from workbench.models.config import VITS, vit_config
from workbench.planner.predict import StepPrediction, predict_step
from workbench.trainer.config import TrainConfig


def predict_arm(config: TrainConfig, facts: DeviceFacts) -> StepPrediction | None:
    """The planner's step for one configuration; ``None`` for models whose shape it does not know."""
    if config.model not in VITS:
        return None
    info = check_source(config.data)
    data = {"num_classes": info.num_classes, "in_channels": info.image_shape[0], "image_size": info.image_shape[1]}
    vit = vit_config(config.model, **{**data, **config.model_args})
    return predict_step(
        vit,
        batch=config.global_batch,
        micro_batch=config.micro_batch,
        precision=config.precision,
        optimizer=config.optimizer,
        fused_optimizer=config.fused_optimizer,
        facts=facts,
    )


def predict_arms(arms: list[Arm], configs: Mapping[str, TrainConfig], facts: DeviceFacts) -> list[PredictionCheck]:
    """Step time of every arm, ratio of every variant, and on a GPU peak memory; ``measured`` is still open.

    A CPU has no allocator that counts: its resident memory holds libraries too and is not what the ledger predicts.
    """
    if arms[0].task == ATTENTION_TASK:
        return predict_patterns(arms)
    checks: list[PredictionCheck] = []
    steps = {arm.name: predict_arm(configs[arm.name], facts) for arm in arms if arm.task == TRAIN_TASK}
    baseline = steps.get(arms[0].name)
    for arm in arms:
        step = steps.get(arm.name)
        if step is None or baseline is None or arm.unavailable:
            continue
        checks.append(PredictionCheck(arm=arm.name, quantity="step_time", predicted=step.step_time))
        if arm is not arms[0]:
            checks.append(
                PredictionCheck(arm=arm.name, quantity="ratio", predicted=baseline.step_time / step.step_time)
            )
        if facts.kind == "cuda":
            total = step.memory.total
            checks.append(
                PredictionCheck(arm=arm.name, quantity="peak_memory_bytes", predicted=total, method="memory ledger")
            )
    return checks


def check_predictions(checks: list[PredictionCheck], results: list[ArmResult]) -> list[PredictionCheck]:
    """The predictions with what was measured and the relative error, predicted / measured − 1."""
    measured = {r.name: r.measurement for r in results}
    baseline = results[0].measurement
    filled = []
    for check in checks:
        m = measured.get(check.arm)
        value: float | None = None
        if m is not None and check.quantity == "step_time":
            value = m.step_time
        elif m is not None and check.quantity == "peak_memory_bytes":
            value = m.peak_memory_bytes
        elif m is not None and baseline is not None:
            value = m.samples_per_s / baseline.samples_per_s
        error = check.predicted / value - 1 if value else None
        filled.append(check.model_copy(update={"measured": value, "error": error}))
    return filled
