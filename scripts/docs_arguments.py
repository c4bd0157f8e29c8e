"""Griffe extension of mkdocs.yml that lists the arguments of functions and classes on the API pages.

Docstrings of this project describe arguments in sentences: "size: elements of a head that are rotated." On the site
each argument is a list item with type, default and shape; sentences about single arguments move there.
"""

import re

from griffe import Class, DocstringSectionText, Extension, Function, ParameterKind

EVERYWHERE = {
    "seed": "(1,) int64, seed of the dropout mask; None: drawn from torch's generator.",
    "site": "below 2^31, distinguishes the dropouts of one model.",
}
"""Descriptions of common arguments, for docstrings that do not mention them."""
FROM_TORCH = "as in torch.nn."
STARS = (ParameterKind.var_positional, ParameterKind.var_keyword)


def _clause(clause: str, one: str) -> tuple[list[str], str] | None:
    """(arguments at the start of a clause, description); None if it also mentions other arguments."""
    match = re.match(rf"((?:{one})(?:, (?:and )?(?:{one}))*)(?=[ ,:])(?! and | to )[ ,:]*(?:is )?(.*)$", clause)
    if match is None or re.search(rf"\b(?:{one}) \(|^\([^()]*\)(?:,| \w+ and) (?:{one})\b", match[2]):
        return None
    return match[1].replace("and ", "").split(", "), f"{match[2].rstrip('.')}."


def told(names: list[str], text: str) -> tuple[dict[str, str], str]:
    """(argument -> description, the docstring's text without sentences that only describe arguments)."""
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    meanings: dict[str, str] = {}
    kept = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("    "):  # code
            kept.append(paragraph)
            continue
        rest = []
        for sentence in re.split(rf"(?<=\.)\s+(?=[A-Z]|(?:{one})\b)", paragraph.strip()):
            flat = re.sub(r"\s+", " ", sentence)
            clauses = [_clause(clause, one) for clause in re.split(rf"; (?=(?:{one})\b)", flat)]
            if None in clauses:
                rest.append(sentence)
            for named, meaning in filter(None, clauses):
                meanings.update({name: meaning for name in named if name not in meanings})
        kept.append(" ".join(rest))
    for name in names:
        if name not in meanings and (shape := re.search(rf"\b{name} (\([^()]*\))", text)):
            meanings[name] = f"{shape[1]}."
    return meanings, "\n\n".join(filter(None, kept))


def list_arguments(thing: Class | Function) -> None:
    """Add the list to the docstring, unless the arguments are documented fields."""
    parameters = [p for p in thing.parameters if p.name not in ("self", "cls") and p.kind not in STARS]
    fields = [thing.members.get(p.name) for p in parameters] if thing.is_class else []
    if not thing.docstring or not parameters or any(field and field.docstring for field in fields):
        return
    first, _, rest = thing.docstring.value.partition("\n\n")
    meanings, rest = told([p.name for p in parameters], rest)
    from_torch = FROM_TORCH if first.startswith("torch.nn.") else ""
    lines = [first, "", rest, "", "**Arguments**", ""]
    for p in parameters:
        kind = f": {p.annotation}" if p.annotation else ""
        default = "" if p.default is None else f" = {p.default}"
        meaning = meanings.get(p.name) or EVERYWHERE.get(p.name) or from_torch
        lines.append(f"- `{p.name}{kind}{default}`" + (f" – {meaning}" if meaning else ""))
    thing.docstring.__dict__["parsed"] = [DocstringSectionText("\n".join(lines))]


class Arguments(Extension):
    """Lists the arguments of every public function and class."""

    def on_function(self, *, func: Function, **_: object) -> None:
        if func.is_public:
            list_arguments(func)

    def on_class(self, *, cls: Class, **_: object) -> None:
        if cls.is_public:
            list_arguments(cls)
