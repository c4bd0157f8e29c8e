"""The score of a file of predictions against the file of right answers, under the names of SQuAD's official script."""

from pathlib import Path

from fasttfm.errors import UserError
from fasttfm_pretraining.data.answers import read_predictions
from fasttfm_pretraining.data.squad import read_squad
from fasttfm_pretraining.data.squad_scores import evaluate
from fasttfm_pretraining.data.swag import ENDINGS, read_swag
from fasttfm_pretraining.data.tables import PACKED, read_table


def score_file(
    predictions: Path, file: Path, null_scores: Path | None = None, threshold: float | None = None
) -> dict[str, float]:
    """Scores by name. file: SQuAD's JSON, SWAG's CSV, or labelled texts, detected by name and columns.

    Raises UserError if the files do not match.
    """
    given = read_predictions(predictions)
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() not in PACKED]
    if suffixes and suffixes[-1] == ".json":
        if threshold is not None and null_scores is None:
            raise UserError("--threshold: is one on null scores: give --null-scores FILE, too")
        null = None if null_scores is None else read_predictions(null_scores, float)
        return _answers(given, file, null, threshold)
    if null_scores is not None or threshold is not None:
        raise UserError("--null-scores and --threshold: are of questions: leave them out")
    return _labels(given, file)


def _answers(
    given: dict[str, str], file: Path, null: dict[str, float] | None, threshold: float | None
) -> dict[str, float]:
    data = read_squad(file)
    report = evaluate(data, given, null, threshold)
    numbers: dict[str, float] = {"exact": report.all.exact, "f1": report.all.f1, "total": report.all.questions}
    for name, part in (("HasAns", report.answerable), ("NoAns", report.impossible)):
        if part is not None and data.may_be_impossible:
            numbers |= {f"{name}_exact": part.exact, f"{name}_f1": part.f1, f"{name}_total": part.questions}
    for name, best in (("exact", report.best_exact), ("f1", report.best_f1)):
        if best is not None:
            numbers |= {f"best_{name}": best[0], f"best_{name}_thresh": best[1]}
    if report.all.unanswered:
        numbers["unanswered"] = report.all.unanswered
    return numbers


def _labels(given: dict[str, str], file: Path) -> dict[str, float]:
    header = read_table(file)[0].values
    if ENDINGS[0] in header:
        wanted = [None if each.label is None else str(each.label) for each in read_swag(file)]
    else:
        wanted = [row.values.get("label") for row in read_table(file)]
    if None in wanted:
        raise UserError(f"{file}: row {wanted.index(None) + 1:,} has no label to score by: give the labelled file")
    if missing := [number for number in range(len(wanted)) if str(number) not in given]:
        raise UserError(f"the predictions lack row {missing[0]:,} (from 0) of {file}: predict that file")
    right = sum(given[str(number)] == label for number, label in enumerate(wanted))
    return {"accuracy": 100 * right / len(wanted), "total": len(wanted)}
