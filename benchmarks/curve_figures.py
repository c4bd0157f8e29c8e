"""The figure of a record of benchmarks.curves: losses by update, and by what was computed where that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.measure.machine import ROOT
from fasttfm.drawing import drawing

IMAGES = ROOT / "docs" / "images"


def draw(record: dict[str, Any], folder: Path) -> Path:
    """Write curves-NAME.png of a comparison into a folder; where it is."""
    runs = record["runs"]
    # cells of a run with bucketed batches hardly differ; those of random lengths do
    costs = [points[-1]["cells"] / points[-1]["target_tokens"] for points in runs.values()]
    axes = [("update", 1.0, "update")]
    if max(costs) > 1.1 * min(costs):
        axes.append(("cells", 1e-6, "computed places of source and target, padding included (millions)"))
    target = folder / f"curves-{record['comparison']}.png"
    folder.mkdir(parents=True, exist_ok=True)
    with drawing(figsize=(6.4 * len(axes), 4.4), dpi=110, layout="constrained") as figure:
        panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
        for panel, (key, unit, label) in zip(panels, axes, strict=True):
            for number, (title, points) in enumerate(runs.items()):
                across = [point[key] * unit for point in points]
                panel.plot(across, [point["train"] for point in points], color=f"C{number}", alpha=0.4, lw=1)
                panel.plot(across, [point["valid"] for point in points], "o-", ms=2.5, color=f"C{number}", label=title)
            panel.set_xlabel(label)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("cross entropy per target token (nats)\npale: training, dots: validation")
        panels[0].legend(frameon=False)
        figure.savefig(target, format="png")
    return target
