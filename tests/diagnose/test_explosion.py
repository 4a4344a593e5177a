import numpy as np
import pytest
import torch

from tests.diagnose.runs import RecordedRun, mlp, resnet, train
from workbench.diagnose.explosion import Explosion, find_explosion
from workbench.errors import Refused

LAYERS = [f"layer{k}" for k in range(12)]


def records(seed: int, steps: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Norms and weights like a run's: layers of different level, a common rise and fall, noise of 0.1 decades."""
    rng = np.random.default_rng(seed)
    common = np.interp(np.arange(steps), [0, steps / 3, steps], [0, rng.uniform(0.3, 1.5), rng.uniform(-1, 0.5)])
    level = rng.normal(-1, 0.3, len(LAYERS))
    log = level + common[:, None] + rng.normal(0, 0.1, (steps, 1)) + rng.normal(0, 0.1, (steps, len(LAYERS)))
    return 10.0**log, np.full_like(log, 3.0)


def find(norm: np.ndarray, weight: np.ndarray | None = None) -> Explosion | None:
    return find_explosion(LAYERS, np.arange(len(norm)) * 10, norm, weight)


@pytest.mark.parametrize("seed", range(20))
def test_the_layer_that_left_the_line_first_is_named_with_its_step(seed: int) -> None:
    """One layer grows from ``start``, the others follow ten records later, all are NaN at the end."""
    norm, weight = records(seed)
    guilty, start = seed % len(LAYERS), 50 + seed
    growth = np.clip(np.arange(len(norm)) - start + 1, 0, None) * 0.25
    norm[:, guilty] *= 10**growth
    norm *= 10.0 ** (np.clip(np.arange(len(norm)) - start - 9, 0, 15) ** 1.5)[:, None]
    norm[start + 18 :] = np.nan
    found = find(norm, weight)
    assert found is not None and found.layer == LAYERS[guilty]
    assert 10 * start <= found.began <= 10 * (start + 5)
    assert found.began <= found.runaway < found.surfaced <= 10 * (start + 18)
    assert found.reason == "own history"


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_layer_out_of_line_from_the_start_is_named_from_the_start(factor: float) -> None:
    norm, weight = records(0)
    norm[:, 7] *= factor
    norm[90:] *= 1e4
    found = find(norm, weight)
    assert found is not None
    assert (found.layer, found.began, found.runaway, found.surfaced) == ("layer7", 0, 900, 900)
    assert found.reason == "peers from the start" and np.sign(found.deviation) == np.sign(np.log10(factor))


def test_an_explosion_of_all_layers_blames_none() -> None:
    norm, weight = records(1)
    norm *= 10.0 ** (np.clip(np.arange(len(norm)) - 80, 0, None) * 0.4)[:, None]
    found = find(norm, weight)
    assert found is not None and found.layer is None and found.reason == "all layers together"
    assert 810 <= found.runaway <= 840 and found.runaway < found.surfaced <= 900


def test_without_a_forerunner_the_last_layer_that_is_not_finite_is_named() -> None:
    norm, weight = records(2)
    norm[70:, :6] = np.nan
    found = find(norm, weight)
    assert found is not None and (found.layer, found.began) == ("layer5", 700)


def test_a_single_spike_and_a_layer_that_came_back_are_no_explosion() -> None:
    norm, weight = records(3)
    norm[60] *= 1e4
    norm[80:100, 4] *= 30
    assert find(norm, weight) is None


@pytest.mark.parametrize("seed", range(40))
def test_healthy_records_raise_no_alarm(seed: int) -> None:
    assert find(*records(seed)) is None


def healthy(seed: int) -> RecordedRun:
    """Real runs: depth, normalisation, optimizer, learning rate and precision vary with the seed."""
    model = resnet(seed) if seed % 6 == 5 else mlp(seed, depth=2 + seed % 3, norm=seed % 2 == 0)
    adam = seed % 4 < 2
    kind, rate = (torch.optim.AdamW, 3e-3) if adam else (torch.optim.SGD, 0.05)
    return train(model, 80, rate=rate * (1 + seed % 3), optimizer=kind, half=seed % 5 == 0, seed=seed)


@pytest.mark.parametrize("seed", range(24))
def test_healthy_runs_raise_no_alarm(seed: int) -> None:
    from workbench.diagnose.scaling import judge_scaling

    run = healthy(seed)
    assert run.losses[-1] < 2
    h, skipped = run.history, [record.skipped for record in run.scales]
    assert find_explosion(h.layers, h.steps, h.norm, h.weight, skipped) is None
    assert judge_scaling(run.scales) == []


@pytest.mark.parametrize("seed", [0, 2])
def test_nan_after_healthy_steps_is_traced_to_the_badly_initialised_layer_from_the_start(seed: int) -> None:
    """fp16 overflows in ``layer4.conv1``, whose ratio of gradient to weight was off from step 0. When depends on the CPU."""
    run = train(resnet(seed, gain=2e4), 120, half=True, init_scale=128.0, seed=seed)
    assert len(run.losses) > 1 and np.isfinite(run.losses[:-1]).all() and not np.isfinite(run.losses[-1])
    h = run.history
    for weight in (h.weight, None):
        found = find_explosion(h.layers, h.steps, h.norm, weight)
        assert found is not None
        assert (found.layer, found.began, found.surfaced) == ("layer4.conv1", 0, len(run.losses) - 1)


def test_weights_spoilt_in_the_middle_of_a_run_are_traced_to_their_step() -> None:
    model = resnet()

    def spoil(step: int) -> None:
        if step == 40:
            with torch.no_grad():
                model.get_parameter("layer3.conv1.weight").mul_(1.2e4)

    run = train(model, 120, half=True, init_scale=128.0, before_step=spoil)
    assert len(run.losses) > 42 and not np.isfinite(run.losses[-1])
    found = find_explosion(run.history.layers, run.history.steps, run.history.norm, run.history.weight)
    assert found is not None and (found.layer, found.began) == ("layer3.conv1", 40)


def test_steps_that_a_loss_scaler_skipped_are_no_explosion_until_there_is_no_end_of_them() -> None:
    norm, weight = records(4)
    norm[:12] = norm[60] = norm[-3:] = np.nan
    skipped = np.isnan(norm[:, 0])
    assert find_explosion(LAYERS, range(len(norm)), norm, weight, skipped) is None
    norm[-9:] = np.nan
    found = find_explosion(LAYERS, range(len(norm)), norm, weight, np.isnan(norm[:, 0]))
    assert found is not None and found.surfaced == len(norm) - 9


def test_a_table_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(Refused, match="shape"):
        find_explosion(LAYERS, [0, 1], np.ones((3, 12)))
