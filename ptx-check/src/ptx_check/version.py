"""The version of the package, which pyproject.toml reads without importing anything."""

__version__ = "0.1.0"
