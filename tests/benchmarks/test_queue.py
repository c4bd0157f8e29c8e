"""The device queue: what it asks and leaves out, what it keeps when it is killed, its verdicts, what is prepared."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from forked import Popen
from waiting import PATIENCE, wait_for_end, wait_until

from benchmarks import command
from benchmarks.measure import machine, records
from benchmarks.queue import prepare, questions, run
from benchmarks.queue.questions import ASK_AGAIN, SHIP, TAKE_BACK, Expected, Question, outcomes, verdict
from fasttfm.errors import UserError

ROOT = machine.ROOT
TIME = {"what": "time", "predicted": 3, "before": 5, "line": r"found (\d+) us"}
EXPECTED = (Expected(**TIME),)


def question(name="first", command="python -c \"print('found 3 us')\"", *, answers=EXPECTED, **fields):
    measures = "benchmarks/queue/questions.py"
    fields = {"decides": f"what {name} is", "seconds": 20, "measures": measures, "answers": answers, **fields}
    return Question(name=name, command=command, **fields)


@pytest.mark.parametrize(
    ("measured", "fields", "expected"),
    [
        (None, {}, ASK_AGAIN),
        (3.2, {}, SHIP),
        (3.4, {}, TAKE_BACK),
        (5.0, {"before": 5}, TAKE_BACK),
        (2.8, {"higher": True}, SHIP),
        (2.7, {"higher": True}, TAKE_BACK),
        (2.5, {"higher": True, "before": 2}, SHIP),
        (2.8, {"over": {"provider": "SDPA"}}, SHIP),
        (0.0, {"predicted": 0}, SHIP),
        (1.0, {"predicted": 0}, TAKE_BACK),
    ],
)
def test_a_verdict_follows_from_prediction_and_earlier_measurement(measured, fields, expected):
    assert verdict(Expected(**{"what": "x", "predicted": 3, "row": {}} | fields), measured) == expected


def test_numbers_come_from_rows_items_and_the_last_matching_line(record):
    rows = [
        *(record(p50=p50, provider="fasttfm") for p50 in (90.0, 100.0)),
        record(p50=150.0, provider="SDPA"),
        {"benchmark": "host", "measured": [{"what": "attention", "ratio": 2.5}]},
    ]
    ours = {"provider": "fasttfm"}
    asked = [
        ({"predicted": 100, "row": {**ours, "shape": {"B": 2}}}, (100.0, SHIP)),
        ({"predicted": 1.5, "row": ours, "over": {"provider": "SDPA"}}, (1.5, SHIP)),
        ({"predicted": 2, "row": {"benchmark": "host", "what": "attention"}, "value": "ratio"}, (2.5, TAKE_BACK)),
        ({"predicted": 7, "line": r"(\d+) passed"}, (7.0, SHIP)),
        ({"predicted": 7, "line": r"(?:(\d+) failed, )?\d+ passed"}, (0.0, SHIP)),
        ({"predicted": 7, "line": r"(\w+) passed and"}, (None, ASK_AGAIN)),
        ({"predicted": 1, "row": {"provider": "nobody"}}, (None, ASK_AGAIN)),
        ({"predicted": 1, "row": ours, "value": "pass"}, (None, ASK_AGAIN)),
    ]
    answers = tuple(Expected(what="x", **fields) for fields, _ in asked)
    found = outcomes(question(answers=answers), rows, "6 passed\n7 passed\nall passed and gone")
    assert [(each["measured"], each["verdict"]) for each in found] == [right for _, right in asked]


def test_our_wrong_result_is_taken_back_a_peers_and_a_noisy_row_are_asked_again(record):
    wrong, good = {"status": "wrong", "reason": "error 1", "time_us": None}, record(p50=100.0)
    ours = Expected(what="time", predicted=100, row={"provider": "fasttfm"})
    ratio = replace(ours, predicted=2, over={"provider": "SDPA"})

    def answered(*rows):
        return [(found["verdict"], found["why"]) for found in outcomes(question(answers=(ours, ratio)), rows, "")]

    assert answered(record(**wrong)) == 2 * [(TAKE_BACK, "fasttfm is wrong: error 1")]
    assert answered(good, record(provider="SDPA", **wrong)) == [(SHIP, ""), (ASK_AGAIN, "SDPA is wrong: error 1")]
    assert answered(record(p50=100.0, spread=0.9))[0] == (ASK_AGAIN, "noisy")


def test_questions_run_in_order_within_the_time_and_are_not_repeated(tmp_path, monkeypatch, capsys):
    asked = [
        question(),
        question("long", seconds=1000),
        question("absent", needs="data"),
        question("broken", "python -c \"print('found 9 us'); raise SystemExit(3)\""),
        question("missing", "no-such-program"),
        question("ours", 'python -c "import benchmarks, ptx_check, fasttfm_pretraining; assert 0, 7"'),
    ]
    done = run.run(asked, 300, results=tmp_path)
    assert [(r["question"], r["status"], r["answers"][0]["verdict"]) for r in done] == [
        ("first", "done", SHIP), ("broken", "failed", TAKE_BACK), ("missing", "failed", ASK_AGAIN),
        ("ours", "failed", ASK_AGAIN),
    ]  # fmt: skip
    assert "AssertionError: 7" in done[-1]["output"]
    text = capsys.readouterr().out
    assert "long: skipped, its limit is 1000 s" in text
    assert "absent: skipped, data is not prepared" in text
    assert re.search(r"\| first +\| time, us +\| 5\.00 +\| 3\.00 +\| 3\.00 +\| ship", text)
    assert run.load(tmp_path) == done
    again = run.run(asked, 300, results=tmp_path)
    assert [r["question"] for r in again] == ["missing", "ours"]  # those without a number
    assert f"first: answered on {done[0]['machine']['time'][:10]}\n" in capsys.readouterr().out
    assert run.run(asked[:1], 300, results=tmp_path, again=True)[0]["question"] == "first"

    assert run.answered(question(), done)
    assert run.answered(question(command="python -c 'print(1)'"), done) is None
    changed, read = Path(questions.__file__), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"other" if self == changed else read(self))
    assert run.answered(question(), done) is None


def test_a_question_at_its_limit_is_stopped_with_its_children_and_its_output_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_GRACE", 1)
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('found 3 us', flush=True)\n"
        "time.sleep(600)\n"
    )
    (record,) = run.run([question(command=f"python {program}", seconds=3)], 60, results=tmp_path / "r")
    assert (record["status"], record["answers"][0]["measured"]) == ("stopped", 3)
    wait_for_end([int((tmp_path / "child").read_text())])


ASKED = {"decides": "x", "command": "python", "seconds": 3, "measures": "Makefile"}
X = {"what": "x", "predicted": 1, "line": "(x)"}


def asked_file(folder: Path, *names: str, **fields) -> Path:
    """File of questions that differ in their names only."""
    (folder / "questions.yaml").write_text(json.dumps({name: {**ASKED, "answers": [X], **fields} for name in names}))
    return folder / "questions.yaml"


def queue_process(results: Path, file: Path, seconds: int) -> subprocess.Popen:
    """Process that runs a file's questions on this machine's CPU."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom benchmarks.queue import questions, run\n"
        "asked = questions.read(Path(sys.argv[1]))\nprint('begins', flush=True)\n"
        "run.run(asked, int(sys.argv[2]), results=Path(sys.argv[3]))"
    )
    results.mkdir(exist_ok=True)
    line = [sys.executable, "-c", program, str(file), str(seconds), str(results)]
    process = Popen(line, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"begins\n"
    return process


def test_a_queue_killed_at_random_times_loses_no_answer_and_resumes(tmp_path):
    slow = "python -c \"import time; time.sleep(0.2); print('found 3 us')\""
    names = [f"q{number}" for number in range(4)]
    file = asked_file(tmp_path, *names, command=slow, seconds=20, answers=[TIME])
    results, draw = tmp_path / "results", random.Random(5)
    known: set[str] = set()
    for kills in range(2, -1, -1):
        process = queue_process(results, file, 200)
        if kills:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0.2, 2))
            process.kill()
        process.communicate()
        answered = {record["question"] for record in run.load(results)}
        assert known <= answered, "an answer was lost"
        known = answered
    assert known == {*names}


def test_a_stopped_queue_ends_its_command(tmp_path):
    mark = tmp_path / "mark"
    asleep = f"python -c \"import os, time; open('{mark}', 'w').write(str(os.getpid())); time.sleep(600)\""
    file = asked_file(tmp_path, "q", command=asleep, seconds=600)
    for number in (signal.SIGTERM, signal.SIGKILL):
        mark.write_text("")
        process = queue_process(tmp_path / "results", file, 900)
        wait_until(mark.read_text)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
        wait_for_end([int(mark.read_text())])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seconds": "soon"}, ".seconds: 'soon' is not of type 'integer'"),
        ({"answers": []}, "needs an answer"),
        ({"answers": [X | {"over": {}}]}, "needs either row"),
        ({"answers": [X | {"line": "x"}]}, "needs one group"),
        ({"answers": [X | {"line": "("}]}, "is not a regular expression"),
        ({"measures": "no/such/*.py"}, "matches no file of the checkout"),
    ],
)
def test_an_invalid_question_is_refused_with_its_name(fields, message, tmp_path):
    with pytest.raises(UserError, match=rf"^questions\.yaml: asked.*{re.escape(message)}"):
        questions.read(asked_file(tmp_path, "asked", **fields))


def test_the_shipped_questions_have_commands_that_exist_and_are_on_the_page():
    asked = questions.read()
    assert len({each.name for each in asked}) == len(asked) >= 10
    assert asked[-1].name == "tests"  # the longest last
    for each in asked:
        words = run.words(each, ROOT, ROOT)
        assert words[0] in (sys.executable, "compute-sanitizer"), each.name
        if words[1:2] == ["-m"] and words[2] != "pytest":
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file() or (ROOT / words[2]).is_dir()
        assert (each.compiles or "python -m x").startswith("python -m ")
    text = run.PAGE.read_text(encoding="utf-8")
    assert run.page_table(asked, run.load(records.RESULTS)) in text, "run python -m benchmarks queue --page"


@pytest.mark.whole
@pytest.mark.parametrize("name", [each.name for each in questions.read() if not each.needs])
def test_a_shipped_question_runs_on_the_stand_in_with_a_short_limit(name, tmp_path, monkeypatch):
    """Its command starts as on a chip, and ends or is stopped with a record."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked = next(each for each in questions.read() if each.name == name)
    line = f"python -m benchmarks.queue.stand_in sm_90 {asked.compiles or asked.command}"
    (tmp_path / "kernels").mkdir()
    (record,) = run.run([replace(asked, command=line, seconds=5)], 60, results=tmp_path, prepared=tmp_path)
    assert record["status"] in ("done", "stopped"), record["output"]
    assert {answer["verdict"] for answer in record["answers"]} <= {SHIP, TAKE_BACK, ASK_AGAIN}


PROGRAM = """
import resource

import torch
from triton._C.libtriton import get_cache_invalidating_env_vars
from fasttfm import functional as F

x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
w = torch.ones(64, device="cuda", dtype=torch.bfloat16)
F.layer_norm(x, w, w).sum().backward()
y = F.layer_norm(x, w, w) @ torch.ones(64, 5, device="cuda", dtype=torch.bfloat16)
assert (y.shape, y.is_cuda, y.device.type, torch.cuda.get_device_capability()) == ((3, 5), True, "cuda", (9, 0))
assert not get_cache_invalidating_env_vars()  # the keys of kernels depend on them, and a device has none

x = torch.randn(1 << 16, 1 << 10, device="cuda", dtype=torch.float64).mul_(2)  # 512 MiB
y = torch.nn.functional.linear(x.to(torch.bfloat16), torch.empty(1 << 15, 1 << 10, device="cuda", dtype=torch.bfloat16))
assert (y.shape, y.stride(), y.dtype) == ((1 << 16, 1 << 15), (1 << 15, 1), torch.bfloat16)
assert not y[-1, -1] and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**20, "large tensors occupy memory"
"""


def test_prepared_kernels_are_found_after_a_move_and_missing_ones_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *map(str, run.SOURCES)]))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked = question("norm", compiles="python -m program")
    (tmp_path / "a" / "kernels").mkdir(parents=True)
    assert prepare._compile([asked], "sm_90", tmp_path / "a") == [], (tmp_path / "a" / "norm.log").read_text()
    prepare._drop_intermediate(tmp_path / "a" / "kernels")
    assert not [x for x in (tmp_path / "a" / "kernels").glob("*/*.cubin") if b".debug_line" in x.read_bytes()]
    names = prepare.compiled(tmp_path / "a")
    assert {name.partition("-")[0] for name in names} >= {"_forward", "_backward"}
    (tmp_path / "a").rename(tmp_path / "b")
    prepare.relocate(tmp_path / "b")
    assert prepare._compile([asked], "sm_90", tmp_path / "b") == []
    assert prepare.compiled(tmp_path / "b") == names  # nothing was compiled anew
    new = tmp_path / "b" / "kernels" / "KEY"
    make = f"import pathlib; p = pathlib.Path('{new}'); p.mkdir(); (p / '_late.cubin').touch(); print('found 3 us')"
    late = question("late", f'python -c "{make}"')
    (record,) = run.run([late], 60, results=tmp_path / "r", prepared=tmp_path / "b")
    assert record["compiled"] == ["_late-KEY"]
    assert prepare._pack(tmp_path / "b") == (tmp_path / "b" / prepare.ARCHIVE).stat().st_size
    with tarfile.open(tmp_path / "b" / prepare.ARCHIVE) as archive:
        assert "kernels/KEY/_late.cubin" in archive.getnames()
    assert "error: 1 kernels were not prepared: _late-KEY\n" in capsys.readouterr().out


def test_only_a_dry_run_needs_no_device(capsys):
    with pytest.raises(UserError, match="needs a CUDA or ROCm device"):
        run.main(["--seconds", "5"])
    assert run.main(["--dry-run", "--seconds", "300"]) == 0
    dry = capsys.readouterr().out
    assert "kernels-attention: the faster tiles" in dry
    assert re.search(r"^\d+ of 300 s planned$", dry, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--prepare|/tmp/x y", "must have no spaces"),
        ("--prepare|/tmp/x|--text|bogus=/tmp", "CORPUS=DIR"),
        ("--prepare|/tmp/x|--package|triton", "NAME==VERSION"),
        ("--prepared|/nowhere|--dry-run", "has no kernels/"),
        ("--only|nothing", "--only nothing matches no question: kernels-attention, "),
        ("--results|{file}/x", "cannot be written"),
    ],
)
def test_invalid_arguments_are_refused_before_any_work(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_require_device", lambda: None)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=re.escape(message)):
        run.main(words.format(file=tmp_path / "file").split("|"))
