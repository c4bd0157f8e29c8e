"""Models that were not written for fasttfm: torch.nn's modules exchanged in place, Hugging Face architectures."""

from fasttfm.convert.replace import Report, replace_modules, restore_modules

__all__ = ["Report", "replace_modules", "restore_modules"]
