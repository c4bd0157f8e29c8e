"""Zero-shot and few-shot evaluation: the likeliest option after the prompt is the answer.

Without solved examples before the question it is zero-shot, with one one-shot, with several few-shot (Brown et al.
2020, section 2). The template tells the task: `{text} TL;DR: {answer}` asks for a summary (Radford et al. 2019, section
3.6).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fasttfm.config.checks import Seed, Whole, check_flags
from fasttfm.errors import UserError
from fasttfm.system.files import read_json
from fasttfm.system.parsing import type_name

if TYPE_CHECKING:
    from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
    from fasttfm_pretraining.models.language_model import LanguageModel

_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class Example:
    """A question with its options."""

    fields: dict[str, str]
    """Fields for the template's braces."""
    options: list[str]
    answer: str
    """Index of the right option."""


def read_examples(path: Path, options: Sequence[str] = ()) -> list[Example]:
    """Read examples from a JSON file. options: default options. Raises UserError with the position of a bad one."""
    examples = []
    for number, given in enumerate(read_json(path, list), start=1):
        where = f"{path}: example {number}"
        if not isinstance(given, dict):
            raise UserError(f'{where} is {type_name(given)}: give {{"text": …, "options": […], "answer": …}}')
        choices = given.get("options", list(options))
        if not (
            isinstance(choices, list) and len(choices) >= 2 and all(isinstance(each, str) and each for each in choices)
        ):
            raise UserError(f"{where} needs a list of at least two options: give them there, or by --options")
        if given.get("answer") not in choices:
            raise UserError(f"{where}: its answer {given.get('answer')!r} is not among its options")
        fields = {name: _text(name, value, where) for name, value in given.items() if name not in ("options", "answer")}
        examples.append(Example(fields, choices, given["answer"]))
    if not examples:
        raise UserError(f"{path}: has no example")
    return examples


def _text(name: str, value: Any, where: str) -> str:
    """Text of a field in a template."""
    if isinstance(value, dict | list):
        raise UserError(f"{where}: {name} is {type_name(value)}, it must be a text or a number")
    return str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompting:
    """Prompt template and comparison of options."""

    template: str = "{text} {answer}"
    """How to write an example, with its fields in braces; text after {answer} is ignored."""
    shots: Whole = 0
    """Number of solved examples before each question."""
    seed: Seed = 1
    """Seed that chooses the solved examples."""
    normalize: bool = False
    """Divide each option's log-probability by its bytes."""

    def __post_init__(self) -> None:
        try:
            parsed = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise UserError(f"--template {self.template!r}: {error}: write a brace of the text twice") from None
        for _, name, layout, conversion in parsed:
            if name is not None and (layout or conversion or not name or set(name) & set(".[]")):
                raise UserError(
                    f"--template {self.template!r}: a field is its name alone in braces, as {{answer}}, without dots, "
                    f"brackets, conversions and widths: correct {name!r}"
                )
        if [name for _, name, _, _ in parsed].count("answer") != 1:
            raise UserError(f"--template {self.template!r}: {{answer}} must stand in it once")
        check_flags(self)

    def write(self, example: Example, answer: str = "") -> str:
        """Text of an example before its answer, and the answer."""
        written = []
        for text, name, _, _ in string.Formatter().parse(self.template):
            written.append(text)
            if name == "answer":
                break
            if name is not None and name not in example.fields:
                known = ", ".join(example.fields) or "none"
                raise UserError(
                    f"--template {self.template!r}: an example has no field {name!r}: its fields are {known}"
                )
            written.append("" if name is None else example.fields[name])
        return "".join(written) + answer

    def prompt(self, examples: Sequence[Example], number: int) -> str:
        """Build the prompt of an example: solved examples drawn from the others, then its question."""
        others = [index for index in range(len(examples)) if index != number]
        if self.shots > len(others):
            raise UserError(f"--shots {self.shots}: there are {len(others)} other examples: give at most so many")
        drawn = np.random.default_rng([self.seed, number]).permutation(others)[: self.shots]
        solved = [self.write(examples[index], examples[index].answer) for index in map(int, drawn)]
        return _BETWEEN.join([*solved, self.write(examples[number])])

    def answers(self, model: LanguageModel, tokenizer: TextTokenizer, examples: Sequence[Example]) -> list[str]:
        """Predict the likeliest option of each example."""
        chosen = []
        for number, example in enumerate(examples):
            scores = option_scores(model, tokenizer, self.prompt(examples, number), example.options)
            if self.normalize:
                scores = [score / len(option.encode()) for score, option in zip(scores, example.options)]
            chosen.append(example.options[int(np.argmax(scores))])
        return chosen


def option_scores(model: Any, tokenizer: TextTokenizer, prompt: str, options: Sequence[str]) -> list[float]:
    """ln p(option | prompt) of each option; long prompts lose their beginning.

    Raises UserError for an option longer than the model's positions.
    """
    from fasttfm.search.batches import inference  # and torch, which the command's flags do without

    before = tokenizer.encode(prompt)
    sequences, scored = [], []
    for option in options:
        whole = tokenizer.encode(prompt + option)
        shared = 0  # tokens may span the border of prompt and option
        while shared < min(len(before), len(whole) - 1) and before[shared] == whole[shared]:
            shared += 1
        count = len(whole) - shared
        if count > model.config.max_length:
            raise UserError(f"an option has {count:,} tokens: the model has {model.config.max_length:,} positions")
        sequences.append([tokenizer.begin, *whole][-(model.config.max_length + 1) :])
        scored.append(count)
    with inference(model):
        return model.log_probabilities(sequences, scored).tolist()
