"""Command lines of `fasttfm train` and `fasttfm average`."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from forked import run

from fasttfm.cli.main import main
from fasttfm.data.tokenizer import train_tokenizer
from fasttfm.store.checkpoint import read_state, read_weights
from fasttfm.store.run_log import read_log
from fasttfm.store.steps import resolve_checkpoint, saved_steps, step_folder
from fasttfm.translate.translator import Translator

SMALL = shlex.split(
    "--d-model 16 --heads 2 --d-ff 32 --encoder-layers 1 --decoder-layers 1 --max-tokens 256 --schedule constant "
    "--lr 0.005 --warmup-updates 2 --valid-interval-updates 4 --save-interval-updates 2 --log-interval 2 "
    "--no-tensorboard --device cpu --workers 1"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text with a space")
    lines = [
        f"the {color} {thing} is {size} .\n"
        for color in ("red", "blue")
        for thing in ("cat", "dog", "house")
        for size in ("big", "small")
    ]
    for name in ("train.en", "train.de", "valid.en", "valid.de"):
        (folder / name).write_text("".join(lines[:6] if "valid" in name else lines * 4))
    for out, more in (("DATA", []), ("SEPARATE", ["--separate-vocab"]), ("LARGER", ["--vocab-size", "34"])):
        files = {"src": "train.en", "tgt": "train.de", "valid-src": "valid.en", "valid-tgt": "valid.de"}
        texts = [f"--{flag}={folder / name}" for flag, name in files.items()]
        more = more if "--vocab-size" in more else ["--vocab-size", "32", *more]
        assert main(["prepare", *texts, *more, "--no-byte-fallback", "--out", str(folder / out)]) == 0
    return folder


def train(data, out, *more):
    return main(["train", "--data", str(data), "--out", str(out), *SMALL, "--max-update", "6", *more])


def go_on(data, model, *more):
    return train(data, model, "--no-valid-bleu", "--max-update", "8", *more)


@pytest.fixture(scope="module")
def trained(data):
    """A model of 6 updates, which tests copy."""
    assert train(data / "DATA", data / "TRAINED", "--no-valid-bleu") == 0
    return data / "TRAINED"


@pytest.fixture
def model(trained, tmp_path, capsys):
    capsys.readouterr()
    return shutil.copytree(trained, tmp_path / "MODEL")


def test_train_prints_the_model_and_its_scores(data, tmp_path, capsys):
    assert train(data / "DATA", tmp_path / "MODEL", "--average-last", "2") == 0
    output = capsys.readouterr()
    assert re.search(r"^finished: max_update 6 is reached$", output.out, re.M)
    assert re.search(r"^last checkpoint: validation loss \d.*BLEU \d", output.out, re.M)
    assert re.search(r"^averaged checkpoint: validation loss \d.*BLEU \d", output.out, re.M)
    assert output.out.splitlines()[-1] == f"model: {tmp_path / 'MODEL'}"
    assert re.search(r"update 6, epoch \d+, loss \d+\.\d+, lr 5\.00e-03, [\d,]+ tokens/s, \d+% padding", output.err)
    made = {path.name for path in (tmp_path / "MODEL").iterdir()}
    assert made >= {"config.yaml", "data.yaml", "spm.model", "train.log.jsonl", "curve.png"}
    assert (tmp_path / "MODEL" / "checkpoints" / "average" / "model.safetensors").exists()


def test_average_prints_the_averaged_updates(model, capsys):
    assert main(["average", str(model), "--last", "2"]) == 0
    assert "average of the checkpoints of updates 4, 6" in capsys.readouterr().out
    assert main(["average", str(model), "--last", "9"]) == 2
    assert "give --last 3" in capsys.readouterr().err


def test_dump_config_prints_the_resolved_configuration_and_needs_no_data(capsys):
    assert main(["train", "--preset", "multi30k", "--d-model", "64", "--dump-config"]) == 0
    output = capsys.readouterr().out
    assert "  d_model: 64\n" in output
    assert "  d_ff: 256\n" in output
    assert "  adam_betas: [0.9, 0.98]\n" in output


@pytest.mark.parametrize(
    ("flag", "named"), [("--lr", "--lr -1.0"), ("--dropout", "--dropout -1.0"), ("--alpha", "--alpha -1.0")]
)
def test_dump_config_prints_nothing_that_training_would_refuse(capsys, flag, named):
    assert main(["train", flag, "-1", "--dump-config"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert named in output.err


def refused(capsys, status):
    """Return the one line that a refused command prints to standard error."""
    error = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    assert len(error) == 1, error
    assert error[0].startswith("fasttfm train: ")
    return error[0]


def test_missing_and_wrong_arguments_are_one_line(data, tmp_path, capsys):
    assert "--data is missing" in refused(capsys, main(["train", "--preset", "demo"]))
    assert "did you mean --d-model?" in refused(capsys, main(["train", "--d-modle", "8"]))
    none = tmp_path / "none"
    assert str(none) in refused(capsys, train(none, tmp_path / "M"))
    assert not (tmp_path / "M").exists()
    assert "--share-embeddings decoder or none" in refused(capsys, train(data / "SEPARATE", tmp_path / "M"))
    assert "--max-tokens" in refused(capsys, train(data / "DATA", tmp_path / "M", "--max-tokens", "8"))
    assert "must be at most 1,024" in refused(capsys, train(data / "DATA", tmp_path / "M", "--threads", "100000000"))


def test_a_model_given_as_data_is_recognized(data, model, tmp_path, capsys):
    message = refused(capsys, train(model, tmp_path / "M"))
    assert f"{model}: is a model directory: --data takes the output directory of fasttfm prepare" in message


def test_a_directory_that_is_no_model_is_left_alone(data, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert "neither empty nor a model directory" in refused(capsys, train(data / "DATA", tmp_path))
    assert os.listdir(tmp_path) == ["thesis.txt"]
    assert "is a file" in refused(capsys, train(data / "DATA", tmp_path / "thesis.txt"))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--d-ff", "64"], "model.d_ff 32, now it is 64"),
        (["--lr", "0.1"], "training.lr 0.005, now it is 0.1: change it with --resume-with lr=0.1, resume with the old"),
        (["--max-tokens", "128"], "data.max_tokens 256, now it is 128"),
        (["--seed", "9"], "training.seed 1, now it is 9"),
        (["--adam-betas", "0.9,0.999"], "training.adam_betas 0.9,0.98, now it is 0.9,0.999"),
    ],
)
def test_resuming_with_another_model_or_recipe_is_refused_and_changes_nothing(data, model, capsys, flags, named):
    before = (model / "config.yaml").read_bytes()
    message = refused(capsys, train(data / "DATA", model, "--no-valid-bleu", *flags))
    assert named in message
    assert "or use another --out" in message
    assert (model / "config.yaml").read_bytes() == before
    assert saved_steps(model) == [2, 4, 6]


def test_resuming_for_longer_or_with_other_logging_is_allowed(data, model, capsys):
    assert go_on(data / "DATA", model, "--log-interval", "1", "--beam", "2") == 0
    assert "resuming from update 6" in capsys.readouterr().err
    assert saved_steps(model)[-1] == 8
    assert "beam: 2" in (model / "config.yaml").read_text()


def test_resume_with_changes_the_learning_rate(data, model, capsys):
    state = read_state(step_folder(model, 6)).tensors
    assert go_on(data / "DATA", model, "--resume-with", "lr=0.002", "--log-interval", "1") == 0
    assert "lr is 0.002 from here on, 0.005 before" in capsys.readouterr().err
    records = read_log(model)
    assert {"kind": "resumed", "step": 6, "lr": 0.002} in records
    assert [record["lr"] for record in records if record["kind"] == "train"][-2:] == [0.002, 0.002]
    assert "\n  lr: 0.002" in (model / "config.yaml").read_text()
    moment = next(name for name in state if name.startswith("adam.exp_avg."))
    assert not torch.equal(read_state(step_folder(model, 8)).tensors[moment], state[moment])
    assert state["adam.step." + moment.removeprefix("adam.exp_avg.")] == 6
    assert read_state(step_folder(model, 8)).tensors["adam.step." + moment.removeprefix("adam.exp_avg.")] == 8


def test_wrong_values_of_resume_with_are_refused(data, model, tmp_path, capsys):
    for given in ("d_ff=64", "lr", "lr=fast"):
        assert "--resume-with" in refused(capsys, go_on(data / "DATA", model, "--resume-with", given))
    message = refused(capsys, train(data / "DATA", tmp_path / "M", "--resume-with", "lr=0.1"))
    assert "has no checkpoint to resume: use the plain option" in message


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (("--max-len-b", "3"), ("--max-len-b", "5"),
         "max_len_b 3, now it is 5: validation scores would not be comparable: resume with --max-len-b 3"),
        (("--no-valid-bleu", "--schedule", "cosine"), ("--no-valid-bleu", "--schedule", "cosine"),
         "training.max_update 6, now it is 8"),
    ],
)  # fmt: skip
def test_settings_that_change_scores_or_the_schedule_cannot_change(data, tmp_path, capsys, first, then, message):
    assert train(data / "DATA", tmp_path / "M", *first) == 0
    capsys.readouterr()
    assert message in refused(capsys, train(data / "DATA", tmp_path / "M", "--max-update", "8", *then))


def test_resuming_with_another_vocabulary_or_text_is_refused(data, model, capsys):
    message = refused(capsys, go_on(data / "LARGER", model))
    assert "vocab" in message
    assert "--vocab-size" not in message
    assert "use the original --data" in message
    description = (model / "data.yaml").read_text()
    (model / "data.yaml").write_text(re.sub(r"max_length: \d+", "max_length: 7", description))
    assert "other text" in refused(capsys, go_on(data / "DATA", model))


def test_another_vocabulary_of_the_same_size_is_noticed(data, model, tmp_path, capsys):
    """It would load and translate into nonsense."""
    other = train_tokenizer(["zwölf Boxkämpfer jagen Viktor quer"] * 9, vocab_size=32, byte_fallback=False)
    other.save(model / "spm.model")
    step = step_folder(model, 6)
    for command in (["translate", str(model)], ["translate", str(model), "--score", str(data / "valid.de")]):
        assert main([*command, "--device", "cpu"]) == 2
        assert f"{step}: was trained with another vocabulary" in capsys.readouterr().err
    assert main(["average", str(model), "--last", "1"]) == 2
    assert f"{step}: was trained with another vocabulary" in capsys.readouterr().err
    shutil.copy(data / "TRAINED" / "spm.model", model / "spm.model")
    (step / "meta.json").write_text((step / "meta.json").read_text().replace('"vocabulary": "', '"vocabulary": "0'))
    error = refused_after_start(capsys, go_on(data / "DATA", model))
    assert f"{step}: was trained with another vocabulary" in error


def refused_after_start(capsys, status):
    error = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    return error[-1]


def test_two_processes_do_not_train_into_one_directory(data, model, capsys):
    fcntl = pytest.importorskip("fcntl")
    with (model / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process" in refused(capsys, go_on(data / "DATA", model))


def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_when_there_is_room(data, tmp_path):
    """A limit on the file size simulates the full disk: the log can be written, the checkpoint cannot."""
    out = tmp_path / "M"
    words = ["train", "--data", str(data / "DATA"), "--out", str(out), *SMALL, "--no-valid-bleu", "--max-update", "6"]
    script = (
        "import resource, sys; from fasttfm.cli.main import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1]))); sys.exit(main(sys.argv[2:]))"
    )
    full = run([sys.executable, "-c", script, "9000", *words], capture_output=True, text=True)
    assert full.returncode == 2
    assert "Traceback" not in full.stderr
    assert re.match(r"fasttfm train: .*step-000000002: cannot save the checkpoint", full.stderr.splitlines()[-1])
    assert saved_steps(out) == []
    process = run([sys.executable, "-c", script, "10000000", *words], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert saved_steps(out) == [2, 4, 6]


def test_a_run_too_short_for_a_record_ends_well_without_a_curve(data, tmp_path, capsys):
    assert train(data / "DATA", tmp_path / "MODEL", "--valid-interval-updates", "0", "--log-interval", "100") == 0
    out, _ = capsys.readouterr()
    assert "curve" not in out
    assert "model: " in out


def test_a_short_trial_run_of_a_recipe_shortens_its_warm_up(capsys):
    assert main(["train", "--preset", "demo", "--max-update", "150", "--dump-config"]) == 0
    assert "warmup_updates: 15\n" in capsys.readouterr().out
    assert main(["train", "--preset", "demo", "--max-update", "150", "--warmup-updates", "200", "--dump-config"]) == 2
    error = capsys.readouterr().err
    assert "--warmup-updates" in error
    assert "such as 15" in error


def test_a_shortened_warm_up_is_reported(data, tmp_path, capsys):
    words = ["train", "--preset", "demo", "--data", str(data / "DATA"), "--out", str(tmp_path / "M")]
    schedule, warmup = SMALL.index("--schedule"), SMALL.index("--warmup-updates")
    small = [word for i, word in enumerate(SMALL) if i not in (schedule, schedule + 1, warmup, warmup + 1)]
    assert main([*words, *small, "--valid-interval-updates", "0", "--no-valid-bleu", "--max-update", "6"]) == 0
    error = capsys.readouterr().err
    assert "warning: a warm-up of 200 updates does not fit into --max-update 6: it is shortened to 0" in error


def test_init_from_starts_with_the_weights_of_another_run(data, model, tmp_path, capsys):
    settings = ("--no-valid-bleu", "--lr", "1e-30", "--max-update", "2")
    for source in (model, step_folder(model, 6), step_folder(model, 6) / "model.safetensors"):
        out = tmp_path / f"M{source.name}"
        assert train(data / "DATA", out, *settings, "--init-from", str(source)) == 0
        begun = read_weights(step_folder(out, 2))
        old = read_weights(resolve_checkpoint(source) if source == model else source)
        assert all(torch.allclose(begun[name], old[name], atol=1e-6) for name in old)
    capsys.readouterr()
    assert "does not exist" in refused(capsys, train(data / "DATA", tmp_path / "N", "--init-from", "nowhere"))
    other = shutil.copytree(step_folder(model, 6), tmp_path / "other")
    (other / "meta.json").write_text('{"vocabulary": "another"}')
    message = refused(capsys, train(data / "DATA", tmp_path / "N", "--init-from", str(other)))
    assert "another vocabulary than the data: prepare them with that of its model (fasttfm prepare --spm" in message


def test_an_unmounted_checkpoint_disk_does_not_restart_a_run(data, model, tmp_path, capsys):
    log = (model / "train.log.jsonl").read_bytes()
    (model / "checkpoints").rename(tmp_path / "disk")
    (model / "checkpoints").symlink_to(tmp_path / "unmounted")
    message = refused(capsys, go_on(data / "DATA", model))
    assert "checkpoints: is a link to" in message
    assert (model / "train.log.jsonl").read_bytes() == log
    (model / "checkpoints").unlink()
    (model / "checkpoints").symlink_to(tmp_path / "disk")
    assert go_on(data / "DATA", model) == 0
    assert saved_steps(model)[-1] == 8


def test_a_failed_plot_is_a_warning(data, tmp_path, capsys, monkeypatch):
    def failing(model_dir):
        raise RuntimeError("no\nfont")

    monkeypatch.setattr("fasttfm.training.plots.plot_curve", failing)
    assert train(data / "DATA", tmp_path / "M", "--no-valid-bleu") == 0
    output = capsys.readouterr()
    assert output.err.splitlines()[-1] == "warning: the loss curve could not be drawn: no font"
    assert "model: " in output.out


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX pipes")
def test_a_reader_that_leaves_costs_no_work(data, tmp_path):
    words = ["train", "--data", str(data / "DATA"), "--out", str(tmp_path / "M"), *SMALL, "--no-valid-bleu"]
    command = shlex.join([sys.executable, "-m", "fasttfm", *words, "--max-update", "9", "--log-interval", "1"])
    done = subprocess.run(f"{command} 2>&1 | head -2", shell=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr == ""
    assert saved_steps(tmp_path / "M")[-1] == 9


@pytest.mark.parametrize("name", ["norm_first", "packed", "embedding_dropout", "adam_betas", "weight_decay", "init"])
def test_the_suggested_flag_for_the_old_value_is_valid(data, trained, name, capsys):
    from fasttfm.config import section_of
    from fasttfm.store.model_dir import _flag, read_config

    old = read_config(trained)[section_of(name)][name]
    assert main(["train", *_flag(name, old).split(), "--dump-config"]) == 0


def test_the_configuration_of_another_models_vocabulary_cannot_be_set_against_the_data(data, tmp_path, capsys):
    separate = ("--share-embeddings", "decoder", "--no-valid-bleu")
    assert train(data / "SEPARATE", tmp_path / "OLD", *separate) == 0
    capsys.readouterr()
    old = str(tmp_path / "OLD" / "config.yaml")
    message = refused(capsys, train(data / "LARGER", tmp_path / "M", "--config", old, "--no-valid-bleu"))
    assert "in the data: omit it" in message
    assert not (tmp_path / "M").exists()
    assert train(data / "DATA", tmp_path / "M", "--config", old, "--no-valid-bleu") == 0
    Translator.from_directory(tmp_path / "M")  # of the same size, and joint now


def test_onednns_caches_are_chosen_unless_the_user_has(data):
    program = (
        "import os, sys\n"
        "from fasttfm.cli.environment import choose_settings\n"
        "print(choose_settings())\n"
        "import torch\n"
        "assert choose_settings() == ''"
    )
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    for given, chosen in (({}, names), ({"LRU_CACHE_CAPACITY": "9"}, names[:1])):
        done = subprocess.run(
            [sys.executable, "-c", program], env={**environment, **given}, capture_output=True, text=True, check=True
        )
        assert re.findall(r"(\w+)=", done.stdout) == list(chosen)


def test_a_stopped_run_reports_its_checkpoints(data, model, tmp_path, capsys, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fasttfm.training.trainer.Trainer.run", stopped)
        assert train(data / "DATA", tmp_path / "NONE") == 130
        assert "stopped before anything was saved in" in capsys.readouterr().err
        assert train(data / "DATA", model, "--no-valid-bleu") == 130
        assert "stopped; update 6 is saved in" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("fasttfm.training.run._finish", stopped)
        assert train(data / "DATA", model, "--no-valid-bleu") == 130
        assert "stopped when training was finished (max_update 6 is reached)" in capsys.readouterr().err


def test_a_run_that_ends_before_its_first_update_names_no_model(data, tmp_path, capsys):
    assert train(data / "DATA", tmp_path / "M", "--max-minutes", "1e-6") == 0
    told = capsys.readouterr().out
    assert "no update was made, so nothing was saved" in told
    assert "model:" not in told


@pytest.mark.parametrize(
    ("units", "precision", "warned"),
    [(["avx2"], "bf16", 1), (["avx2"], "fp32", 0), (["avx2"], "auto", 0), (["amx_bf16"], "bf16", 0)],
)
def test_emulated_bf16_is_reported_before_training(units, precision, warned, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("fasttfm.cli.train.processor_units", lambda: units)
    paths = ["--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    given = f"--preset demo --device cpu --workers 1 --precision {precision}"
    assert main(["train", *paths, *given.split()]) == 2
    told = capsys.readouterr()
    assert (told.out + told.err).count("give --precision fp32") == warned
