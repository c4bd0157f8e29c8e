"""Translation from text to text with a trained model; server/ serves it over HTTP."""

from fasttfm.config.decoding import DecodingConfig
from fasttfm.translate.shortlist import Shortlist
from fasttfm.translate.terminology import Terminology
from fasttfm.translate.translator import Translation, Translator

__all__ = ["DecodingConfig", "Shortlist", "Terminology", "Translation", "Translator"]
