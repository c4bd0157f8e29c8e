"""The translation pipeline interface of Hugging Face, removed in transformers 5: text in, dictionaries out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasttfm.errors import UserError
from fasttfm.translate.translator import Translator

TASKS = ("translation", "text2text-generation")


class TranslationPipeline:
    """Callable that translates a text or a list of texts into {"translation_text": ...} dictionaries."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator

    def __call__(self, texts: str | Sequence[str]) -> list[Any]:
        """One dictionary per text; with config.nbest > 1, a list of nbest dictionaries per text.

        A text with line breaks is translated as one line. Raises TypeError for anything but a text or list of texts.
        """
        lines = [texts] if isinstance(texts, str) else list(texts)
        for index, line in enumerate(lines):
            if not isinstance(line, str):
                raise TypeError(f"text {index} is of type {type(line).__name__}: give a text or a list of texts")
        nbest = self.translator.translate_nbest([" ".join(line.splitlines()) for line in lines])
        results = [[{"translation_text": each.text} for each in best] for best in nbest]
        return results if self.translator.config.nbest > 1 else [best[0] for best in results]


def pipeline(task: str, model: str | Path, *, device: str | None = None, **options: Any) -> TranslationPipeline:
    """A translation pipeline for a model directory.

    task: translation, or a form like translation_en_to_de. model: directory of `fasttfm train`, `fasttfm import` or
    save_pretrained(). options: of Translator.from_directory(), fields of DecodingConfig included. Raises UserError for
    an unknown task or an invalid model directory.
    """
    if task not in TASKS and not task.startswith("translation_"):
        raise UserError(f"task {task!r} is unknown: fasttfm has {' and '.join(TASKS)}")
    return TranslationPipeline(Translator.from_directory(model, device=device, **options))
