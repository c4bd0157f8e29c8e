"""Hugging Face's translation pipeline, which transformers 5 dropped: text in, dictionaries out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasttfm.errors import UserError
from fasttfm.translate.translator import Translator

TASKS = ("translation", "text2text-generation")


class TranslationPipeline:
    """Translates a text or a list of texts when it is called; gives {"translation_text": ...} for each."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator

    def __call__(self, texts: str | Sequence[str]) -> list[Any]:
        """A list with a dictionary for each text; where config.nbest is more than 1, with a list of nbest of them.

        A text with line breaks is translated as one line. Raises TypeError for what is neither a text nor a list of
        texts.
        """
        lines = [texts] if isinstance(texts, str) else list(texts)
        for index, line in enumerate(lines):
            if not isinstance(line, str):
                raise TypeError(f"text {index} is of type {type(line).__name__}: give a text or a list of texts")
        nbest = self.translator.translate_nbest([" ".join(line.splitlines()) for line in lines])
        results = [[{"translation_text": each.text} for each in best] for best in nbest]
        return results if self.translator.config.nbest > 1 else [best[0] for best in results]


def pipeline(task: str, model: str | Path, *, device: str | None = None, **options: Any) -> TranslationPipeline:
    """Return a translation pipeline for a model directory.

    task: translation, also as translation_en_to_de. model: what `fasttfm train`, `fasttfm import` or save_pretrained()
    made. options: those of Translator.from_directory, fields of DecodingConfig among them. Raises UserError for an
    unknown task and for a directory that is not a model.
    """
    if task not in TASKS and not task.startswith("translation_"):
        raise UserError(f"task {task!r} is unknown: fasttfm has {' and '.join(TASKS)}")
    return TranslationPipeline(Translator.from_directory(model, device=device, **options))
