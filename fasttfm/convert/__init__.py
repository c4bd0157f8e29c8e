"""Foreign models on fasttfm: in-place replacement of torch.nn modules, Hugging Face models, other tools' formats."""

from fasttfm.convert.replace import Report, replace_modules, restore_modules

__all__ = ["Report", "replace_modules", "restore_modules"]
