"""The device queue: what it asks and leaves out, what it keeps when it is killed, its verdicts, what is prepared."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import PATIENCE, wait_for_end, wait_until

from benchmarks.measure import machine, records
from benchmarks.queue import page, prepare, questions, run
from benchmarks.queue.questions import ASK_AGAIN, SHIP, TAKE_BACK, Expected, Question, outcomes, verdict
from fasttfm.errors import UserError

ROOT = machine.ROOT


def question(name="first", command="python -c \"print('found 3 us')\"", *, seconds=20, **fields) -> Question:
    expected = Expected(what="time", predicted=3, before=5, line=r"found (\d+) us")
    return Question(
        name=name, decides=f"what {name} is", command=command, seconds=seconds,
        measures=("benchmarks/queue/questions.py",), answers=(expected,), **fields,
    )  # fmt: skip


def kept(results: Path) -> dict[str, dict]:
    return {record["question"]: record for record in page.load(results)}


@pytest.mark.parametrize(
    ("measured", "fields", "expected"),
    [
        (None, {}, ASK_AGAIN),
        (3.2, {}, SHIP),
        (3.4, {}, TAKE_BACK),
        (4.9, {"before": 5}, SHIP),
        (5.0, {"before": 5}, TAKE_BACK),
        (2.8, {"higher": True}, SHIP),
        (2.7, {"higher": True}, TAKE_BACK),
        (2.5, {"higher": True, "before": 2}, SHIP),
        (2.8, {"over": {"provider": "SDPA"}}, SHIP),
        (0.0, {"predicted": 0}, SHIP),
        (1.0, {"predicted": 0}, TAKE_BACK),
    ],
)
def test_a_verdict_follows_from_prediction_and_what_was_before(measured, fields, expected):
    assert verdict(Expected(**{"what": "x", "predicted": 3, "row": {}} | fields), measured) == expected


def test_numbers_are_found_in_rows_in_items_and_in_the_last_line_of_the_output(record):
    rows = [
        *(record(p50=p50, provider="fasttfm") for p50 in (90.0, 100.0)),
        record(p50=150.0, provider="SDPA"),
        {"benchmark": "host", "measured": [{"what": "attention", "ratio": 2.5}]},
    ]
    asked = replace(
        question(),
        answers=(
            Expected(what="time", predicted=100, row={"provider": "fasttfm", "shape": {"B": 2}}),
            Expected(what="ratio", predicted=1.5, row={"provider": "fasttfm"}, over={"provider": "SDPA"}),
            Expected(what="host", predicted=2, row={"benchmark": "host", "what": "attention"}, value="ratio"),
            Expected(what="line", predicted=7, line=r"(\d+) passed"),
            Expected(what="none", predicted=1, row={"provider": "nobody"}),
            Expected(what="text", predicted=1, row={"provider": "fasttfm"}, value="pass"),
        ),
    )
    found = outcomes(asked, rows, "6 passed\n7 passed\n")
    assert [(each.measured, each.verdict) for each in found] == [
        (100.0, SHIP), (1.5, SHIP), (2.5, TAKE_BACK), (7.0, SHIP), (None, ASK_AGAIN), (None, ASK_AGAIN)
    ]  # fmt: skip


@pytest.mark.parametrize(("said", "failed"), [("3 failed, 854 passed in 9s", 3), ("857 passed in 9s", 0), ("", None)])
def test_no_failure_is_an_answer_too(said, failed):
    (asked,) = (each for each in questions.read() if each.name == "tests")
    assert outcomes(asked, [], said)[1].measured == failed


def test_a_wrong_number_of_ours_is_taken_back_a_peers_and_a_noisy_row_are_asked_again(record):
    wrong = record(provider="fasttfm", status="wrong", reason="error 1", time_us=None)
    ours = Expected(what="time", predicted=100, row={"provider": "fasttfm"})
    ratio = Expected(what="ratio", predicted=2, row={"provider": "fasttfm"}, over={"provider": "SDPA"})
    asked = replace(question(), answers=(ours, ratio))
    first, second = outcomes(asked, [wrong], "")
    assert (first.verdict, first.measured, second.verdict) == (TAKE_BACK, None, TAKE_BACK)
    assert "error 1" in first.why
    peer = record(provider="SDPA", status="wrong", reason="error 1", time_us=None)
    first, second = outcomes(asked, [record(p50=100.0, provider="fasttfm"), peer], "")
    assert (first.verdict, second.verdict) == (SHIP, ASK_AGAIN)
    (noisy, _) = outcomes(asked, [record(p50=100.0, spread=0.9, provider="fasttfm")], "")
    assert (noisy.verdict, noisy.why) == (ASK_AGAIN, "noisy")


def test_it_asks_in_order_within_its_time_keeps_each_and_does_not_ask_again(tmp_path):
    said: list[str] = []
    asked = [
        question(),
        question("long", seconds=1000),
        question("absent", needs="data"),
        question("broken", "python -c \"print('found 9 us'); raise SystemExit(3)\""),
        question("missing", "no-such-program"),
    ]
    done = run.run(asked, 300, results=tmp_path, tell=said.append)
    assert [(r["question"], r["status"], r["answers"][0]["verdict"]) for r in done] == [
        ("first", "done", SHIP), ("broken", "failed", TAKE_BACK), ("missing", "failed", ASK_AGAIN)
    ]  # fmt: skip
    text = "\n".join(said)
    assert "long: left out, it may take 1000 s" in text
    assert "absent: left out, data is not prepared" in text
    assert re.search(r"\| first +\| time, us +\| 5\.00 +\| 3\.00 +\| 3\.00 +\| ship", text)
    assert set(kept(tmp_path)) == {"first", "broken", "missing"}
    said.clear()
    again = run.run(asked, 300, results=tmp_path, tell=said.append)
    assert [r["question"] for r in again] == ["missing"]  # the only one without a number
    assert f"first: answered on {done[0]['machine']['time'][:10]}" in said
    assert run.run(asked[:1], 300, results=tmp_path, again=True, tell=said.append)[0]["question"] == "first"


def test_what_it_measures_changes_the_answer_is_none(tmp_path, monkeypatch):
    run.run([question()], 60, results=tmp_path, tell=lambda line: None)
    (known,) = kept(tmp_path).values()
    assert run.answered(question(), [known])
    assert run.answered(question(command="python -c 'print(1)'"), [known]) is None
    changed, read = Path(questions.__file__), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"other" if self == changed else read(self))
    assert run.answered(question(), [known]) is None


def test_a_question_beyond_its_limit_is_stopped_with_all_it_started_and_its_records_count(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "print('found 3 us', flush=True)\n"
        "time.sleep(600)\n"
    )
    (record,) = run.run(
        [question(command=f"python {program}", seconds=3)], 60, results=tmp_path / "r", tell=lambda line: None
    )
    assert (record["status"], record["answers"][0]["measured"]) == ("stopped", 3)
    assert 3 <= record["seconds"] < 3 + run._GRACE
    wait_for_end([int((tmp_path / "child").read_text())])


def asked_file(folder: Path, *names: str, **fields) -> Path:
    """A file of questions, alike but for their names."""
    answers = [{"what": "x", "predicted": 1, "line": "(x)"}]
    asked = {"decides": "x", "command": "python", "seconds": 3, "measures": "Makefile", "answers": answers, **fields}
    (folder / "questions.yaml").write_text(json.dumps(dict.fromkeys(names, asked)))
    return folder / "questions.yaml"


def queue_process(results: Path, file: Path, seconds: int) -> subprocess.Popen:
    """A queue of a file's questions on this machine's CPU."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom benchmarks.queue import questions, run\n"
        "asked = questions.read(Path(sys.argv[1]))\nprint('begins', flush=True)\n"
        "run.run(asked, int(sys.argv[2]), results=Path(sys.argv[3]))"
    )
    results.mkdir(exist_ok=True)
    line = [sys.executable, "-c", program, str(file), str(seconds), str(results)]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"begins\n"
    return process


def test_a_queue_killed_at_random_moments_loses_no_answer_and_goes_on(tmp_path):
    command = "python -c \"import time; time.sleep(0.3); print('found 3 us')\""
    answers = [{"what": "time", "predicted": 3, "line": r"found (\d+) us"}]
    names = [f"q{number}" for number in range(5)]
    file = asked_file(tmp_path, *names, command=command, seconds=20, answers=answers)
    results, draw = tmp_path / "results", random.Random(5)
    known: set[str] = set()
    for kills in range(2, -1, -1):
        process = queue_process(results, file, 200)
        if kills:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0.2, 4))
            process.kill()
        process.communicate()
        answered = kept(results)
        assert known <= set(answered), "an answer was lost"
        known = set(answered)
    assert known == {*names}


def test_a_stopped_queue_ends_what_it_runs(tmp_path):
    mark = tmp_path / "mark"
    command = f"python -c \"import os, time; open('{mark}', 'w').write(str(os.getpid())); time.sleep(600)\""
    file = asked_file(tmp_path, "q", command=command, seconds=600)
    for number in (signal.SIGTERM, signal.SIGKILL):
        mark.write_text("")
        process = queue_process(tmp_path / "results", file, 900)
        wait_until(mark.read_text)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
        wait_for_end([int(mark.read_text())])


def test_an_answer_that_is_no_number_loses_no_record():
    asked = replace(question(), answers=(Expected(what="x", predicted=3, line=r"found (\S+)"),))
    (found,) = outcomes(asked, [], "found nothing")
    assert (found.measured, found.verdict) == (None, ASK_AGAIN)


def test_a_folder_of_results_that_cannot_be_written_is_refused_before_anything_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_require_device", lambda: None)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--results .* cannot be written"):
        run.main(["--results", str(tmp_path / "file" / "x")])


X = {"what": "x", "predicted": 1, "line": "(x)"}
BAD = {
    "seconds": ({"seconds": "soon"}, "asked.seconds: 'soon' is not of type 'integer'"),
    "true": ({"seconds": True}, "True is not of type 'integer'"),
    "unknown": ({"second": 3}, "'second' was unexpected"),
    "no answers": ({"answers": []}, "asked.answers: []"),
    "no list": ({"answers": 5}, "5 is not of type 'array'"),
    "neither": ({"answers": [{"what": "x", "predicted": 1}]}, "needs either row"),
    "both": ({"answers": [X | {"over": {}}]}, "needs either row"),
    "group": ({"answers": [X | {"line": "x"}]}, "needs one group"),
    "expression": ({"answers": [X | {"line": "("}]}, "is no regular expression"),
    "predicted": ({"answers": [X | {"predicted": "soon"}]}, "asked.answers[0].predicted: 'soon'"),
    "higher": ({"answers": [X | {"higher": "no"}]}, "'no' is not of type 'boolean'"),
    "row": ({"answers": [X | {"row": "x"}]}, "'x' is not of type 'object'"),
    "command": ({"command": 5}, "asked.command: 5 is not of type 'string'"),
    "list": ({"measures": ["Makefile"]}, "asked.measures: ['Makefile'] is not of type 'string'"),
    "files": ({"measures": "no/such/*.py"}, "no file of the checkout"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_question_that_cannot_be_asked_is_refused_with_its_name(case, tmp_path):
    fields, said = BAD[case]
    with pytest.raises(UserError, match="asked") as error:
        questions.read(asked_file(tmp_path, "asked", **fields))
    assert said in str(error.value)


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    (tmp_path / "questions.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"^questions\.yaml "):
        questions.read(tmp_path / "questions.yaml")


def test_the_shipped_questions_name_commands_that_exist_and_what_they_ask_is_on_the_page():
    asked = questions.read()
    assert len({each.name for each in asked}) == len(asked) >= 10
    assert asked[-1].name == "tests"  # the longest last
    for each in asked:
        words = run.words(each, ROOT, ROOT)
        assert words[0] in (sys.executable, "compute-sanitizer"), each.name
        if words[1:2] == ["-m"] and words[2] != "pytest":
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file() or (ROOT / words[2]).is_dir()
        if each.compiles:
            assert each.compiles.startswith("python -m ")
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.text(asked, page.load(records.RESULTS)) in text, "run python -m benchmarks queue --page"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [each.name for each in questions.read() if not each.needs and each.compiles != ""])
def test_a_shipped_question_is_asked_of_the_stand_in_within_a_tiny_limit(name, tmp_path, monkeypatch):
    """Its command starts as on a chip, and is stopped or ends; what it wrote until then is a record."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked = next(each for each in questions.read() if each.name == name)
    command = f"python -m benchmarks.queue.stand_in sm_90 {asked.compiles or asked.command}"
    (tmp_path / "kernels").mkdir()
    (record,) = run.run(
        [replace(asked, command=command, seconds=12)], 60, results=tmp_path, prepared=tmp_path, tell=lambda line: None
    )
    assert record["status"] in ("done", "stopped"), record["output"]
    assert {answer["verdict"] for answer in record["answers"]} <= {SHIP, TAKE_BACK, ASK_AGAIN}


def test_without_a_device_it_refuses_in_a_line_and_a_dry_run_needs_none():
    line = [sys.executable, "-m", "benchmarks", "queue"]
    done = subprocess.run([*line, "--seconds", "5"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no CUDA or ROCm device" in done.stderr
    dry = subprocess.run([*line, "--dry-run", "--seconds", "300"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "kernels-attention: the faster tiles" in dry.stdout
    assert re.search(r"^\d+ of 300 s at most$", dry.stdout, re.MULTILINE)
    done = subprocess.run([*line, "--only", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


PROGRAM = """
import torch
from fasttfm import functional as F

x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
w = torch.ones(64, device="cuda", dtype=torch.bfloat16)
F.layer_norm(x, w, w).sum().backward()
y = F.layer_norm(x, w, w) @ torch.ones(64, 5, device="cuda", dtype=torch.bfloat16)
assert (y.shape, y.is_cuda, y.device.type, torch.cuda.get_device_capability()) == ((3, 5), True, "cuda", (9, 0))
"""


def test_prepared_kernels_are_found_where_they_were_carried_to_and_others_are_named(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *map(str, run.SOURCES)]))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked = question("norm", "python -c \"print('found 3 us')\"", compiles="python -m program")
    (tmp_path / "a" / "kernels").mkdir(parents=True)
    assert prepare._compile(asked, "sm_90", tmp_path / "a"), (tmp_path / "a" / "norm.log").read_text()
    prepare._drop_intermediate(tmp_path / "a" / "kernels")
    names = prepare.compiled(tmp_path / "a")
    assert {name.partition("-")[0] for name in names} >= {"_forward", "_backward"}
    (tmp_path / "a").rename(tmp_path / "b")
    prepare.relocate(tmp_path / "b")
    assert prepare._compile(asked, "sm_90", tmp_path / "b")
    assert prepare.compiled(tmp_path / "b") == names  # nothing was compiled anew
    new = tmp_path / "b" / "kernels" / "KEY"
    make = f"import pathlib; p = pathlib.Path('{new}'); p.mkdir(); (p / '_late.cubin').touch(); print('found 3 us')"
    said: list[str] = []
    (record,) = run.run(
        [question("late", f'python -c "{make}"')], 60, results=tmp_path / "r", prepared=tmp_path / "b", tell=said.append
    )
    assert record["compiled"] == ["_late-KEY"]
    assert any("fault: 1 kernels were not prepared: _late-KEY" in line for line in said)


def test_bad_arguments_of_prepare_are_named():
    for words, said in (
        (["--prepare", "/tmp/x y"], "without spaces"),
        (["--prepare", "/tmp/x", "--text", "multi30k"], "CORPUS=DIR"),
        (["--prepare", "/tmp/x", "--text", "bogus=/tmp"], "CORPUS=DIR"),
        (["--prepare", "/tmp/x", "--package", "triton"], "NAME==VERSION"),
        (["--prepared", "/nowhere", "--dry-run"], "holds no kernels/"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            run.main(words)
