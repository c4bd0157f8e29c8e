"""Command lines of `fasttfm translate`, `quantize` and `plot --attention` on a model directory."""

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import Popen, forked_children
from model_dirs import resolve
from safetensors.torch import load_file, save_file
from waiting import PATIENCE

from fasttfm.cli.main import main
from fasttfm.cpu import int8
from fasttfm.data.tokenizer import BOS, EOS, train_tokenizer
from fasttfm.models import Transformer
from fasttfm.store.checkpoint import MODEL_FILE, save_checkpoint
from fasttfm.store.steps import step_folder
from fasttfm.store.weights import model_weights
from fasttfm.translate.translator import Translator

TEXT = ["a dog runs over the green grass", "two men sit in a small boat", "ein Hund läuft über die grüne Wiese"]
INPUT = "a dog\n\ntwo men sit in a boat\r\n   \nthe green grass"
SIZE = {"d_model": 16, "heads": 2, "d_ff": 32, "encoder_layers": 2, "decoder_layers": 2}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A random model with two checkpoints, in a path with a space."""
    path = tmp_path_factory.mktemp("with space") / "model"
    path.mkdir()
    tokenizer = train_tokenizer(TEXT, vocab_size=320)
    tokenizer.save(path / "spm.model")
    (path / "data.yaml").write_text("train:\n  longest_source: 40\n")
    settings = {**SIZE, "beam": 2, "max_len_b": 3}
    config = resolve(overrides=settings, from_data={"vocab_size": len(tokenizer)})
    (path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    for step in (1, 2):
        torch.manual_seed(step)
        save_checkpoint(
            step_folder(path, step), model_weights(Transformer(config.model)), {"step": step, "best_step": 1}
        )
    return path


@pytest.fixture
def translate(monkeypatch, capsysbinary):
    """Run `fasttfm translate` on a text: (exit status, standard output, lines of standard error)."""

    def run(*arguments, text: str | bytes = INPUT):
        data = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        status = main(["translate", *map(str, arguments)])
        out, err = capsysbinary.readouterr()
        return status, out.decode(), err.decode().splitlines()

    return run


def test_one_line_comes_out_for_every_line_that_goes_in(translate, model_dir):
    status, out, errors = translate(model_dir)
    assert (status, errors) == (0, [])
    lines = out.split("\n")
    assert lines.pop() == "", "the last line is ended"
    assert [bool(line) for line in lines] == [True, False, True, False, True]


def test_nothing_in_gives_nothing_out(translate, model_dir):
    assert translate(model_dir, text="") == (0, "", [])


def test_buffers_and_batches_change_nothing(translate, model_dir):
    expected = translate(model_dir)
    assert translate(model_dir, "--buffer-size", 1) == expected
    assert translate(model_dir, "--batch-tokens", 1) == expected


def test_workers_change_nothing(translate, model_dir):
    expected = translate(model_dir, "--workers", 1)
    assert translate(model_dir, "--workers", 3) == expected
    assert "--workers: '0' was given, it must be auto or a number from 1" in failure(
        translate(model_dir, "--workers", 0)
    )


def test_a_reader_that_goes_away_ends_the_workers(model_dir, tmp_path):
    text = tmp_path / "text"
    text.write_text("a dog runs\nover the green grass\n" * 2_000)
    words = [sys.executable, "-m", "fasttfm", "translate", str(model_dir), "--workers", "2", "--buffer-size", "8"]
    with text.open() as lines:
        process = Popen(words, env=forked_children(), stdin=lines, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"", "ends as soon as nobody, and no worker, can write to it any more"
    assert process.wait(timeout=PATIENCE) == 141


def test_settings_come_from_the_model_and_flags_win(translate, model_dir):
    expected = translate(model_dir)
    assert translate(model_dir, "--beam", 2, "--max-len-b", 3) == expected
    longer = translate(model_dir, "--beam", 2, "--max-len-b", 30, "--min-len", 25)
    assert len(longer[1]) > len(expected[1])


def test_checkpoints_are_chosen_by_name_number_and_path(translate, model_dir):
    best, last = translate(model_dir), translate(model_dir, "--checkpoint", "last")
    assert best[1] != last[1]
    assert translate(model_dir, "--checkpoint", "best") == best
    assert translate(model_dir, "--checkpoint", 2) == last
    assert translate(model_dir, "--checkpoint", step_folder(model_dir, 2)) == last
    assert translate(model_dir, "--checkpoint", step_folder(model_dir, 2) / MODEL_FILE) == last


def test_n_best_lists_are_numbered(translate, model_dir):
    status, out, _ = translate(model_dir, "--nbest", 2)
    assert status == 0
    rows = [line.split(" ||| ") for line in out.splitlines()]
    assert [row[0] for row in rows] == ["0", "0", "1", "2", "2", "3", "4", "4"]
    assert float(rows[0][2]) >= float(rows[1][2])


def test_sampling_repeats_itself(translate, model_dir):
    first = translate(model_dir, "--sampling", "--sampling-seed", 5)
    assert first[0] == 0
    assert translate(model_dir, "--sampling", "--sampling-seed", 5) == first
    assert translate(model_dir, "--sampling", "--sampling-seed", 6) != first


def test_prefixes_begin_the_translations(translate, model_dir, tmp_path):
    prefixes = tmp_path / "prefixes"
    prefixes.write_text("ein Hund\n\nzwei\n\n\n", encoding="utf-8")
    _, out, _ = translate(model_dir, "--prefix", prefixes)
    lines = out.splitlines()
    assert lines[0].startswith("ein Hund")
    assert lines[2].startswith("zwei")
    prefixes.write_text("ein\n", encoding="utf-8")
    status, out, errors = translate(model_dir, "--prefix", prefixes)
    assert status == 2
    assert "fewer prefixes than lines of the input (line 2 has none)" in errors[0]
    assert out.startswith("ein"), "the lines that have a prefix are translated"
    assert out.count("\n") == 1


def test_alignments_have_a_line_for_every_output_line(translate, model_dir, tmp_path):
    file = tmp_path / "alignment"
    for settings in ([], ["--nbest", 2], ["--mbr-samples", 3], ["--sampling", "--nbest", 3]):
        text = "a dog\n\ntwo men  sit\tin\u00a0a boat\n \n"
        status, out, errors = translate(model_dir, "--alignment", file, *settings, text=text)
        assert (status, errors) == (0, [])
        assert out == translate(model_dir, *settings, text=text)[1], "the translations are what they were"
        rows = [line.split(" ||| ") for line in out.splitlines()]
        numbers = [int(row[0]) for row in rows] if len(rows[0]) > 1 else range(4)
        aligned = file.read_text(encoding="utf-8").splitlines()
        assert len(aligned) == len(rows)
        for number, row, links in zip(numbers, rows, aligned, strict=True):
            source, target = text.splitlines()[number].split(), (row[1] if len(row) > 1 else row[0]).split()
            pairs = [tuple(map(int, link.split("-"))) for link in links.split()]
            assert {word for _, word in pairs} == {*range(len(target))}, "every word of the translation is linked"
            assert all(0 <= word < len(source) for word, _ in pairs)
    assert "there is no directory" in failure(translate(model_dir, "--alignment", tmp_path / "none" / "x"))
    assert "alignment_layer 3" in failure(translate(model_dir, "--alignment", file, "--alignment-layer", 3))


def test_terms_are_translated_as_the_file_says(translate, model_dir, tmp_path):
    file = tmp_path / "terms.tsv"
    file.write_text("dog\tRüde\tHündin\n\ngreen  grass\tgrünes Gras\r\nboat\tBoot\n", encoding="utf-8")
    text = "a dog\n\nthe Dog and the dog\nsteamboats\nthe green\tgrass\n"
    status, out, errors = translate(model_dir, "--terminology", file, text=text)
    assert (status, errors) == (0, [])
    lines, free = out.split("\n"), translate(model_dir, text=text)[1].split("\n")
    assert len(re.findall(r"\b(Rüde|Hündin)\b", lines[0])) == 1
    assert len(re.findall(r"\b(Rüde|Hündin)\b", lines[2])) == 2
    assert re.search(r"\bgrünes Gras\b", lines[4])
    assert (lines[1], lines[3]) == (free[1], free[3]), "no term, no change"
    for content, message in (
        ("dog\n", "line 1: 'dog' has no translation"),
        ("boat\tBoot\n\tHund\n", "line 2: the term is empty"),
        ("dog\tHund\t\n", "line 1: a translation is empty"),
        ("dog\tHund\nboat\t\u3000\n", "line 2: a translation is empty"),
    ):
        file.write_text(content, encoding="utf-8")
        assert message in failure(translate(model_dir, "--terminology", file))
    file.write_bytes(b"dog\tR\xfcde\n")
    assert "line 1 is not valid UTF-8" in failure(translate(model_dir, "--terminology", file))
    file.write_text("", encoding="utf-8")
    assert translate(model_dir, "--terminology", file) == translate(model_dir)
    assert "needs a beam search" in failure(translate(model_dir, "--terminology", file, "--sampling"))


def test_sentences_of_a_line_are_translated_one_by_one(translate, model_dir, tmp_path):
    pytest.importorskip("sentencex")
    text = "A dog runs. Two men sit!\n\nThe green grass\n"
    status, out, errors = translate(model_dir, "--split-sentences", "en", "--alignment", tmp_path / "a", text=text)
    assert (status, errors) == (0, [])
    single = translate(model_dir, text="A dog runs.\nTwo men sit!\n\nThe green grass\n")[1].split("\n")
    assert out.split("\n") == [f"{single[0]} {single[1]}", *single[2:]]
    links = (tmp_path / "a").read_text().split("\n")
    assert {int(link.split("-")[1]) for link in links[0].split()} == {*range(len(out.split("\n")[0].split()))}
    assert "not 2: leave out --nbest" in failure(translate(model_dir, "--split-sentences", "en", "--nbest", 2))
    assert "give the language" in failure(translate(model_dir, "--split-sentences", "?"))


def test_flags_that_mean_nothing_together_are_refused(translate, model_dir):
    told = failure(translate(model_dir, "--beam", 2, "--split-sentences", "en", "--prefix", "x"))
    assert "--split-sentences and --prefix do not go together: leave out one of them" in told


def test_progress_is_shown_on_a_terminal_alone(translate, model_dir, monkeypatch):
    expected = translate(model_dir)
    assert expected[2] == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, out, errors = translate(model_dir)
    assert (status, out) == expected[:2]
    assert "5 lines" in errors[-1]


def test_banned_words_do_not_occur(translate, model_dir, tmp_path):
    tokenizer = Translator.from_directory(model_dir, device="cpu").target_tokenizer
    free = translate(model_dir)[1]
    pieces = [tokenizer.decode([token]) for token in range(4, len(tokenizer))]
    words = [word for word in pieces if word.isalpha() and word in free and len(tokenizer.encode(word)) == 1]
    (tmp_path / "banned").write_text("".join(f"{word}\n" for word in [*words, ""]), encoding="utf-8")
    status, out, errors = translate(model_dir, "--banned", tmp_path / "banned")
    assert (status, errors) == (0, [])
    assert out == "".join(
        f"{line}\n"
        for line in Translator.from_directory(model_dir, device="cpu", banned=words).translate(INPUT.splitlines())
    )
    assert (out == free) == (not words)
    assert "none" in failure(translate(model_dir, "--banned", tmp_path / "none"))


def test_truncated_and_long_lines_are_reported(translate, model_dir):
    status, out, errors = translate(model_dir, "--max-source-length", 20, text="a dog\n" + "dog " * 10_000 + "\n")
    assert status == 0
    assert len(out.splitlines()) == 2
    assert len(errors) == 2
    assert "warning: truncated after 20 tokens: 1 line (first: line 2): split" in errors[0]
    assert "longer than twice the longest line of training" in errors[1]
    assert "1 line (first: line 2)" in errors[1]


def test_decomposed_input_is_reported(translate, model_dir):
    _, _, errors = translate(model_dir, text="ein Hund\nein Hund la\u0308uft\n\u200b\n")
    assert len(errors) == 1
    assert "not in Unicode's normal form C: 1 line (first: line 2)" in errors[0]


def test_empty_translations_are_allowed_only_by_min_len_and_reported(translate, model_dir, monkeypatch):
    from fasttfm.search.constraints import Constraints

    forbid = Constraints.apply

    def likes_to_end(self, log_probabilities, *where):
        log_probabilities[:, EOS] += 100
        forbid(self, log_probabilities, *where)

    monkeypatch.setattr(Constraints, "apply", likes_to_end)
    text = "a dog\n\ntwo men\n"
    _, out, errors = translate(model_dir, text=text)
    assert [bool(line) for line in out.splitlines()] == [True, False, True]
    assert errors == []
    _, out, errors = translate(model_dir, "--min-len", 0, text=text)
    assert out == "\n\n\n"
    assert errors == ["fasttfm translate: warning: empty translation: 2 lines (first: line 1): give --min-len 1"]


def test_the_precision_can_be_lowered(translate, model_dir):
    status, out, _ = translate(model_dir, "--precision", "bf16")
    assert status == 0
    assert len(out.splitlines()) == 5


def failure(result) -> str:
    """The one line that a failed command printed."""
    status, _, errors = result
    assert status == 2
    assert len(errors) == 1
    assert errors[0].startswith("fasttfm translate: ")
    return errors[0]


@pytest.mark.parametrize(
    "device", ["hpu", "privateuseone", "mkldnn", "opengl", "ideep", "vulkan", "xla", "fpga", "cpu:x"]
)
def test_a_device_that_this_machine_lacks_is_refused_in_a_short_line(translate, model_dir, device):
    told = failure(translate(model_dir, "--device", device))
    assert device in told
    assert told.endswith(("use cpu or cuda", "use cpu, cuda or cuda:1"))
    assert len(told) < 120


@pytest.mark.parametrize("settings", [["--beam", 4_096], ["--sampling", "--nbest", 10_000_000]])
def test_a_search_larger_than_the_memory_is_refused_before_it_begins(translate, model_dir, settings, monkeypatch):
    monkeypatch.setattr("fasttfm.search.capacity.available_bytes", lambda: 10 << 20)
    told = failure(translate(model_dir, *settings, text="a dog\ntwo men\n"))
    assert re.search(
        rf"{settings[-2]} {settings[-1]:,} needs about [0-9,.]+ GiB for 2 sentences at once, but 0.0 GiB", told
    )
    assert told.endswith(f"give a smaller {settings[-2]} or --batch-tokens")


def test_a_model_of_another_padding_is_refused(translate, model_dir, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(model_dir, other)
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("pad_id: 0", "pad_id: 3"), encoding="utf-8")
    assert re.search(r"config\.yaml, line \d+: model\.pad_id is 3, but 0 in the data", failure(translate(other)))


def test_unusable_arguments_end_in_one_line(translate, model_dir, tmp_path):
    assert "does not exist" in failure(translate(tmp_path / "none"))
    assert "has no config.yaml" in failure(translate(tmp_path))
    assert "line 2 is not valid UTF-8" in failure(translate(model_dir, text=b"a dog\nM\xe4nner\n"))
    assert "--nbest 3 is more than decoding.beam 2" in failure(translate(model_dir, "--nbest", 3))
    assert "beam 0" in failure(translate(model_dir, "--beam", 0))
    assert "last, best, average" in failure(translate(model_dir, "--checkpoint", "newest"))
    assert "fasttfm average" in failure(translate(model_dir, "--checkpoint", "average"))
    assert "cuda:99" in failure(translate(model_dir, "--device", "cuda:99"))
    assert "device meta cannot be used here" in failure(translate(model_dir, "--device", "meta"))
    assert "checkpoint '' was not found" in failure(translate(model_dir, "--checkpoint", ""))
    assert "below 2^63" in failure(translate(model_dir, "--buffer-size", 10**30))


def test_a_damaged_model_ends_in_one_line(translate, model_dir, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(model_dir, broken)
    weights = step_folder(broken, 1) / MODEL_FILE
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert "truncated" in failure(translate(broken))
    weights.write_bytes(content)
    (broken / "config.yaml").write_text(
        (broken / "config.yaml").read_text().replace("d_model: 16", "d_model: 32"), encoding="utf-8"
    )
    assert "is for another model" in failure(translate(broken))
    config = (broken / "config.yaml").read_bytes()
    (broken / "config.yaml").write_bytes(b"")
    assert "is truncated: it has no model.vocab_size" in failure(translate(broken))
    (broken / "config.yaml").write_bytes(config)
    (broken / "spm.model").write_bytes(b"nothing")
    assert "not a SentencePiece model" in failure(translate(broken))
    train_tokenizer(TEXT, vocab_size=310).save(broken / "spm.model")
    assert "310 pieces but config.yaml says 320" in failure(translate(broken))
    (broken / "spm.model").unlink()
    assert "no such SentencePiece model" in failure(translate(broken))


def test_a_reader_that_leaves_early_causes_no_complaint(model_dir):
    command = [sys.executable, "-m", "fasttfm.cli.main", "translate", str(model_dir), "--buffer-size", "1"]
    process = Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C"},
    )
    process.stdin.write("über\n".encode())
    process.stdin.flush()
    assert process.stdout.readline().endswith(b"\n"), "the first line comes while the input is still open"
    process.stdout.close()
    process.stdin.write(b"a dog\n" * 100)
    process.stdin.close()
    assert process.wait(PATIENCE) == 141
    assert process.stderr.read() == b""


def test_attention_is_drawn(model_dir, tmp_path, capsys):
    picture = tmp_path / "attention.png"
    assert main(["plot", str(model_dir), "--attention", "a dog $x$ 日", "--out", str(picture), "--layers", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    for arguments, message in (
        (["Hund \udcff"], "the sentence 'Hund \\udcff' is not valid UTF-8"),
        (["a dog", "--layers", "3"], "layers 1 to 2"),
        (["a dog", "--over", "minutes"], "do not go together"),
        (["a dog", "--layers", "one"], "give numbers"),
        ([""], "is empty"),
        (["\u00a0\u3000 \t"], "is empty"),
        (["dog " * 100], "give a shorter one"),
        (["a dog", "--out", str(tmp_path / "x.docx")], "docx"),
        (["a dog", "--out", str(tmp_path / "none" / "x.png")], "there is no directory"),
    ):
        out = [] if "--out" in arguments else ["--out", str(picture)]
        assert main(["plot", str(model_dir), *out, "--attention", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_the_picture_has_the_given_name(model_dir, tmp_path):
    assert main(["plot", str(model_dir), "--attention", "a dog", "--out", str(tmp_path / "picture")]) == 0
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
    assert os.listdir(tmp_path) == ["picture"]


STRANGE = ["a\u2028dog\x85x", "a\0dog", "a\tdog\x0c", "👩\u200d👩\u200d👧 dog", "\ufeffa dog\r", "\u2581", "<s>"]
STRANGE += ["שלום a dog"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "flags",
    [["--quiet"], ["--alignment", "links"], ["--terminology", "terms"], ["--split-sentences", "en"],
     ["--coverage-penalty", "0.5"], ["--diverse-beam-groups", "2"], ["--prefix", "begin"]],
    ids=lambda flags: flags[0],
)  # fmt: skip
def test_strange_lines_give_one_line_each_with_any_option(translate, model_dir, tmp_path, monkeypatch, flags):
    if flags[0] == "--split-sentences":
        pytest.importorskip("sentencex")
    monkeypatch.chdir(tmp_path)
    lines = [*(line for line in STRANGE if line != "<s>"), "", "&#10;&#xD800;", "dog " * 600, " ", "a dog"]
    (tmp_path / "terms").write_text("dog\tH\u2028und\x00\n\u2581\t\x01\n", encoding="utf-8")
    (tmp_path / "begin").write_text("".join(f"{line}\n" for line in reversed(lines)), encoding="utf-8")
    status, out, errors = translate(model_dir, *flags, text="".join(f"{line}\n" for line in lines))
    assert status == 0, errors
    assert out.count("\n") == len(out.splitlines()) == len(lines)
    assert [bool(line) for line in out.splitlines()][-2:] == [False, True]
    assert all(re.search(r"truncated after 512 tokens|longest line of training", error) for error in errors)
    if flags[0] == "--alignment":
        assert (tmp_path / "links").read_text().count("\n") == len(lines)
    (tmp_path / "begin").write_text("")
    assert translate(model_dir, *flags, text="") == (0, "", [])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("choice", "message"),
    [("fast", "FASTTFM_BACKEND is 'fast': choose auto, triton or torch"), ("triton", "TRITON_INTERPRET=1")],
)
def test_an_impossible_backend_is_refused(model_dir, choice, message):
    environment = {**os.environ, "FASTTFM_BACKEND": choice, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fasttfm.cli.main", "translate", str(model_dir), "--device", "cpu"]
    done = subprocess.run(command, input=b"a dog\n", capture_output=True, env=environment, check=False)
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_given_translations_get_the_models_log_probability(translate, model_dir, tmp_path):
    sources, targets = ["a dog", "", "two men sit", "a dog"], ["ein Hund", "die Wiese", "", "ein Hund"]
    text = "".join(f"{line}\n" for line in sources)
    (tmp_path / "tgt").write_text("".join(f"{line}\n" for line in targets), encoding="utf-8")
    arguments = [model_dir, "--score", tmp_path / "tgt", "--device", "cpu"]
    status, out, errors = translate(*arguments, text=text)
    assert (status, errors) == (0, [])
    actual = [float(line) for line in out.splitlines()]
    translator = Translator.from_directory(model_dir, device="cpu")
    for score, source, target in zip(actual, sources, targets, strict=True):
        source_ids = torch.tensor([[*translator.source_tokenizer.encode(source), EOS]])
        ids = translator.target_tokenizer.encode(target)
        with torch.no_grad():
            logits = translator.model(source_ids, torch.tensor([[BOS, *ids]]))[0].double()
        expected = sum(logits.log_softmax(1)[position, token].item() for position, token in enumerate([*ids, EOS]))
        assert score == pytest.approx(expected, abs=1e-4)
    for more, fewer in (("ein Hund\n", "tgt"), ("ein Hund\n" * 9, "standard input")):
        (tmp_path / "tgt").write_text(more, encoding="utf-8")
        told = failure(translate(*arguments, text=text))
        assert f"{fewer} has fewer lines" in told
        assert "both must align line by line" in told
    assert "--score and --beam do not go together" in failure(translate(*arguments, "--beam", "2", text=text))


def test_an_ensemble_of_one_model_twice_is_that_model(translate, model_dir, tmp_path):
    assert translate(model_dir, "--ensemble", model_dir) == translate(model_dir)
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    train_tokenizer([*TEXT, "noch ein Satz"], vocab_size=320).save(other / "spm.model")
    told = failure(translate(model_dir, "--ensemble", other))
    assert "its spm.model is not that of" in told
    assert "does not exist" in failure(translate(model_dir, "--ensemble", tmp_path / "none"))


def test_a_quantized_model_is_smaller_and_translates_as_the_model_does_in_int8(translate, model_dir, tmp_path):
    out = tmp_path / "int8"
    assert main(["quantize", str(model_dir), "--out", str(out)]) == 0
    stored = step_folder(out, 1) / MODEL_FILE
    assert stored.stat().st_size < 0.75 * (step_folder(model_dir, 1) / MODEL_FILE).stat().st_size
    status, in_int8, errors = translate(model_dir, "--precision", "int8")
    assert f"{out}: int8, " in in_int8
    in_int8 = in_int8.partition("before)\n")[2]
    without_route = int8.route() is None  # then float32 takes its place, which a process says once
    assert status == 0
    assert [each for each in errors if not (without_route and "int8 computes in float32" in each)] == []
    assert translate(out)[1] == in_int8
    assert translate(out, "--precision", "int8", "--workers", 2)[1] == in_int8
    assert translate(out, "--precision", "fp32")[0] == 0
    scores = [
        [float(line.rsplit("||| ", 1)[1]) for line in translate(model_dir, "--nbest", 2, *words)[1].splitlines()]
        for words in ((), ("--precision", "int8"))
    ]
    assert (scores[0] == scores[1]) == without_route
    assert scores[0] == pytest.approx(scores[1], rel=0.02)


def test_unusable_models_and_outputs_are_refused_by_quantize(model_dir, tmp_path, refusal_of):
    weights = load_file(step_folder(model_dir, 1) / MODEL_FILE)
    name = next(name for name in weights if name.endswith("linear1.weight"))
    save_file({**weights, name: weights[name][:-1].contiguous()}, tmp_path / "short.safetensors")
    save_file({**weights, name: weights[name].short()}, tmp_path / "whole.safetensors")
    assert main(["quantize", str(model_dir), "--out", str(tmp_path / "int8")]) == 0
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    for words, out, message in (
        ([model_dir, "--checkpoint", tmp_path / "short.safetensors"], "x", f"is for another model: {name} has shape"),
        ([model_dir, "--checkpoint", tmp_path / "whole.safetensors"], "x", f"{name} is int16 without a scale"),
        ([model_dir, "--checkpoint", "9"], "x", "checkpoint '9' was not found"),
        ([tmp_path / "int8"], "x", "is already int8"),
        ([tmp_path], "x", "is not a model directory"),
        ([model_dir], "full", "contains other files (notes), which are not replaced"),
    ):
        assert message in refusal_of(["quantize", *words, "--out", tmp_path / out])
        assert not (tmp_path / "x").exists()


def test_a_quantized_model_without_a_scale_is_refused(translate, model_dir, tmp_path):
    out = tmp_path / "int8"
    assert main(["quantize", str(model_dir), "--out", str(out)]) == 0
    weights = load_file(step_folder(out, 1) / MODEL_FILE)
    del weights[next(name for name in weights if name.endswith(".scale"))]
    save_file(weights, tmp_path / "x.safetensors")
    told = failure(translate(out, "--checkpoint", tmp_path / "x.safetensors"))
    assert "is int8 but has no float32 scale" in told
