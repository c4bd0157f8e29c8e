"""Training: recipe, schedule, trainer, checkpoints, averaging, exact resume."""
