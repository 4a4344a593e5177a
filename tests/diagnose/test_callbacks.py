import numpy as np
import pytest
import torch

from workbench.diagnose.callbacks import MonitorGradients, WatchScale
from workbench.diagnose.scaling import HALVES_FOR_EVER
from workbench.trainer.config import LossScaling, TrainConfig
from workbench.trainer.loop import Diverged, Trainer

TINY = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32}


def trainer(*callbacks: MonitorGradients | WatchScale, **settings: object) -> Trainer:
    fields = {"model_args": TINY, "device": "cpu", "global_batch": 16, "steps": 40, "warmup_steps": 2, **settings}
    return Trainer(TrainConfig(**fields), callbacks=callbacks)


def test_the_monitors_norms_are_those_of_the_trainers_own_records() -> None:
    monitor = MonitorGradients(every=2)
    records = trainer(monitor).train(6)
    history = monitor.history()
    assert history is not None and history.steps.tolist() == [0, 2, 4]
    total = np.sqrt((history.norm**2).sum(axis=1))
    np.testing.assert_allclose(total, [records[k].grad_norm for k in (0, 2, 4)], rtol=1e-4)
    assert np.isfinite(history.update_ratio[:, history.layers.index("head")][1:]).all()
    assert monitor.explosion() is None


def test_a_healthy_fp16_run_calibrates_without_a_symptom() -> None:
    monitor = MonitorGradients(every=1)
    watch = WatchScale(gradients=monitor)
    records = trainer(monitor, watch, precision="fp16", loss_scaling=LossScaling(init=2.0**24)).train(14)
    assert any(r.skipped for r in records) and not all(r.skipped for r in records)
    assert watch.symptoms == [] and monitor.explosion() is None


def test_a_layer_that_overflows_for_ever_is_named() -> None:
    monitor = MonitorGradients(every=1)
    watch = WatchScale(gradients=monitor)
    run = trainer(monitor, watch, precision="fp16", loss_scaling=LossScaling(init=2.0**4))
    with torch.no_grad():
        run.model.get_parameter("head.weight").normal_(std=1e4)
    # Logits of 1e5 are infinite in fp16, and every gradient is spoilt.
    with pytest.raises(Diverged, match=r"the scale's floor; first .inf at step 4 on rank 0: \w+ in head \(forward"):
        run.train(20)
    assert [(s.fault, s.where) for s in watch.symptoms] == [(HALVES_FOR_EVER, "head")]
