"""Trains a TimeSeriesTransformer to forecast a day of ETTh1's oil temperature, beside two naive forecasts.

    python -m examples.time_series --data ETTh1.csv.gz [--updates 600] [--out forecast]

Chronological split, the scaler fitted on the training part alone. The decoder is given the last known value at every
future position; source and target are differences from it. Writes the errors to OUT.json and forecasts to OUT.png.
"""

import argparse
import csv
import gzip
import json
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from benchmarks.machine import describe
from fasttfm.models import TimeSeriesTransformer

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DAY, MONTH = 24, 30 * 24
PAST, FUTURE = 2 * DAY, DAY
TRAIN, VALID, TEST = 12 * MONTH, 4 * MONTH, 4 * MONTH  # the usual split of this series


def read(path: Path) -> Tensor:
    """The column OT, hourly, (T,)."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return torch.tensor([float(row["OT"]) for row in csv.DictReader(lines)])


def windows(series: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Every (past, future) whose future lies in first .. last: (n, PAST), (n, FUTURE)."""
    both = series[max(0, first - PAST) : last].unfold(0, PAST + FUTURE, 1)
    return both[:, :PAST], both[:, PAST:]


def forecast(model: TimeSeriesTransformer, past: Tensor) -> Tensor:
    """past (B, PAST), scaled, to (B, FUTURE)."""
    last = past[:, -1:]
    source = (past - last)[..., None]
    return last + model(source, torch.zeros(past.shape[0], FUTURE, 1))[..., 0]


def mae(got: Tensor, expected: Tensor) -> float:
    return (got - expected).abs().mean().item()


def train(
    model: TimeSeriesTransformer, past: Tensor, future: Tensor, valid: tuple[Tensor, Tensor], updates: int
) -> None:
    """Adam on the absolute error; keeps the weights that are best on the validation part."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, updates)
    best, kept = float("inf"), {}
    for update in range(1, updates + 1):
        rows = torch.randint(past.shape[0], (64,))
        model.train()
        loss = (forecast(model, past[rows]) - future[rows]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if update % 100 == 0 or update == updates:
            error = mae(predict(model, valid[0][::12]), valid[1][::12])
            print(f"update {update}: training error {loss.item():.4f}, validation error {error:.4f}", flush=True)
            if error < best:
                best, kept = error, {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(kept)


@torch.no_grad()
def predict(model: TimeSeriesTransformer, past: Tensor) -> Tensor:
    model.eval()
    return torch.cat([forecast(model, chunk) for chunk in past.split(256)])


def draw(path: Path, past: Tensor, future: Tensor, got: Tensor) -> None:
    """Four test days, in degrees."""
    _, axes = plt.subplots(2, 2, figsize=(10, 6))
    for axis, row in zip(axes.flat, range(0, past.shape[0], past.shape[0] // 4 + 1)):
        axis.plot(range(-2 * DAY, 0), past[row, -2 * DAY :], label="past", color="0.5")
        axis.plot(range(FUTURE), future[row], label="what came")
        axis.plot(range(FUTURE), got[row], label="forecast")
        axis.set_xlabel("hours")
        axis.set_ylabel("oil temperature (°C)")
    axes.flat[0].legend()
    plt.tight_layout()
    plt.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="ETTh1.csv.gz")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("forecast"), help="where .json and .png go")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    series = read(options.data)
    mean, deviation = series[:TRAIN].mean(), series[:TRAIN].std()
    scaled = (series - mean) / deviation
    past, future = windows(scaled, PAST, TRAIN)
    valid = windows(scaled, TRAIN, TRAIN + VALID)
    test_past, test_future = windows(scaled, TRAIN + VALID, TRAIN + VALID + TEST)
    model = TimeSeriesTransformer(d_model=32, heads=4, triangular_memory_mask=False, encoder_layers=1, decoder_layers=1)
    train(model, past, future, valid, options.updates)
    got = predict(model, test_past)
    forecasts = {
        "TimeSeriesTransformer": got,
        "last value": test_past[:, -1:].expand_as(test_future),
        "same hour of the day before": test_past[:, -DAY:],
    }
    errors = {
        name: {
            "mae": mae(x, test_future),
            "mae_degrees": mae(x, test_future) * deviation.item(),
            "mse": (x - test_future).square().mean().item(),
        }
        for name, x in forecasts.items()
    }
    print(f"{'held-out error of a day ahead':32} {'MAE':>8} {'MAE (°C)':>9} {'MSE':>8}")
    for name, row in errors.items():
        print(f"{name:32} {row['mae']:8.4f} {row['mae_degrees']:9.3f} {row['mse']:8.4f}")
    record = {"example": "time_series", "windows": test_past.shape[0], "updates": options.updates, "seed": options.seed}
    options.out.with_suffix(".json").write_text(json.dumps(record | {"errors": errors} | describe()) + "\n")
    draw(options.out.with_suffix(".png"), *(x * deviation + mean for x in (test_past, test_future, got)))


if __name__ == "__main__":
    main()
