"""Configuration: precedence of sources, refused values, flags, presets."""

import dataclasses

import pytest
import torch
from model_dirs import resolve

from fasttfm.cli.parser import Parser
from fasttfm.config import (
    FROM_DATA,
    SECTIONS,
    add_flags,
    all_fields,
    dump_yaml,
    field_help,
    field_types,
    flag_values,
    gather,
    read_yaml,
    with_defaults,
)
from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.presets import preset_names, preset_path
from fasttfm.errors import UserError
from fasttfm.search.hypotheses import length_penalty

SIZE = {"vocab_size": 100}


@pytest.fixture
def write(tmp_path):
    """Write a configuration file and return its path."""

    def run(text: str | bytes, name: str = "my.yaml"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / name

    return run


def refusal(**sources) -> str:
    with pytest.raises(UserError) as error:
        resolve(**{"from_data": SIZE, **sources})
    assert "\n" not in str(error.value)
    return str(error.value)


# Precedence


def test_the_command_line_overrides_yaml_and_yaml_the_preset(write):
    first = write("model:\n  d_model: 96\n  heads: 2\ntraining:\n  lr: 5e-4\n", "first.yaml")
    second = write("model:\n  d_model: 64\n", "second.yaml")
    config = resolve("multi30k", [first, second], {"heads": "4"}, SIZE)
    assert config.model.d_ff == 256  # preset
    assert config.training.lr == 5e-4  # first file
    assert config.model.d_model == 64  # second file
    assert config.model.heads == 4  # command line


def test_a_dumped_configuration_reads_back_equal(write):
    overrides = {"adam_betas": "0.8,0.9", "embedding_dropout": "none"}
    config = resolve("tensor2tensor-base", overrides=overrides, from_data=SIZE)
    for from_data in (None, SIZE):
        assert resolve(files=[write(config.to_yaml())], from_data=from_data) == config
    dumped = write(dump_yaml(with_defaults(gather("demo"))))
    empty, none = write("", "a.yaml"), write("model:\ntraining: {}\n", "b.yaml")
    for files in ([dumped], [dumped, empty, none]):
        assert resolve(files=files, from_data=SIZE) == resolve("demo", from_data=SIZE)


# Refusals

REMOVED = "if another version of fasttfm wrote the file, delete the line"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model:\n  d_modle: 64\n", f", line 2: model.d_modle is unknown: did you mean d_model? ({REMOVED})"),
        ("model:\n  lr: 0.1\n", ", line 2: model.lr is unknown: lr belongs to section training"),
        ("model:\n  d_model: wide\n", ", line 2: model.d_model: 'wide' must be an integer"),
        ("model:\n  d_ff: 9999999999999999999\n", ", line 2: model.d_ff: 9999999999999999999 must be an integer below"),
        ("model:\n  norm_first: 1\n", ", line 2: model.norm_first: 1 must be true or false"),
        ("model:\n  activation: tanh\n", ", line 2: model.activation: 'tanh' must be one of relu, gelu"),
        ("training:\n  adam_betas: 0.9\n", ", line 2: training.adam_betas: 0.9 must be 2 values"),
        ("# a list\n- model\n", ", line 2: the file must be a mapping"),
        ("# a model\nmodel:\n  heads: 3\n", ", line 3: d_model 512 is not a multiple of model.heads 3"),
        ("model: 3\n", ", line 1: section model must be a mapping"),
        ("model:\n\td_model: 3\n", ", line 2: not valid YAML"),
        (b"\xef\xbb\xbfmodel:\n  d_model: 64 # \xff\n", ", line 2: not valid UTF-8 (byte 0xff at byte 17 of the line)"),
    ],
)
def test_an_invalid_yaml_file_is_refused_with_its_line(write, text, complaint):
    path = write(text)
    assert refusal(files=[path]).startswith(f"{path}{complaint}")


def test_a_missing_file_and_an_unknown_preset_are_named(tmp_path):
    assert f"{tmp_path / 'a.yaml'}: No such file" in refusal(files=[tmp_path / "a.yaml"])
    assert "preset 'mult30k' is unknown: did you mean multi30k?" in refusal(preset="mult30k")


def test_a_value_out_of_range_names_its_flag():
    assert refusal(overrides={"label_smoothing": 1.5}).startswith("--label-smoothing 1.5 must be below 1")
    assert refusal(overrides={"heads": 3}) == "d_model 512 is not a multiple of --heads 3"
    told = refusal(overrides={"layer_norm_eps": "1e-400"})
    assert told == "--layer-norm-eps 0.0 must be a finite number greater than 0"
    for text in ("inf", "nan", ".inf", "1e999", "infinity"):
        assert refusal(overrides={"layer_norm_eps": text}).startswith(f"--layer-norm-eps: '{text}' must")


@pytest.mark.parametrize("field", FROM_DATA)
def test_a_file_that_contradicts_the_data_is_refused(write, field):
    path = write(f"model:\n  share_embeddings: none\n  {field}: 90\n")
    told = refusal(files=[path])
    assert told.startswith(f"{path}, line 3: model.{field} is 90, but ")
    assert told.endswith(" in the data: omit it")
    assert f"--{field.replace('_', '-')}" not in parser().format_help()


# Numbers and other types


@pytest.mark.parametrize("text", ["1_0", "010", "1:30", "0x10", "0o17", "0b1", "1__0", "１０", "1e", "--1"])
def test_ambiguous_numbers_are_refused(write, text):
    for field, rule in (("max_update", "an integer"), ("lr", "a number"), ("adam_betas", "2 values|a number")):
        with pytest.raises(UserError, match=rf"^--{field.replace('_', '-')}: .*must be ({rule})"):
            gather(overrides={field: text if field != "adam_betas" else f"{text},0.9"})
        given = text if field != "adam_betas" else f"[{text}, 0.9]"
        with pytest.raises(UserError, match=rf"line 2: training\.{field}"):
            read_yaml(write(f"training:\n  {field}: {given}\n"))


@pytest.mark.parametrize(
    ("text", "number"), [("1e5", 1e5), ("+3", 3), ("-0", 0), (".5", 0.5), ("5.", 5), ("5E-4", 5e-4), ("'7'", 7)]
)
def test_numbers_are_parsed_the_same_in_a_file_and_in_a_flag(write, text, number):
    assert read_yaml(write(f"training:\n  lr: {text}\n"))["training"]["lr"] == number
    plain = text.strip("'")
    assert gather(overrides={"lr": plain})["training"]["lr"] == number
    assert parse("--lr", plain) == {"lr": number}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("max_update", "1e5", 100_000),
        ("embedding_dropout", "None", None),
        ("valid_bleu", "False", False),
        ("adam_betas", "(0.9, 0.98)", (0.9, 0.98)),
        ("rates", "[ed]*coder.*=0.1, *embedding.weight=0", ("[ed]*coder.*=0.1", "*embedding.weight=0")),
        ("rates", "none", ()),
    ],
)
def test_strings_are_converted_to_the_fields_type(kind, text, value):
    assert gather(overrides={kind: text})[all_fields()[kind]][kind] == value


# Flags


def parser() -> Parser:
    training = Parser(prog="fasttfm train")
    add_flags(training)
    return training


def parse(*words):
    return flag_values(parser().parse_args(words))


def test_every_field_has_a_flag_a_docstring_and_a_name_of_its_own():
    flags = parser()
    for section, cls in SECTIONS.items():
        for name in field_types(cls):
            assert field_help(cls).get(name, "").endswith("."), f"{section}.{name} needs a docstring"
            if name not in FROM_DATA:
                assert f"--{name.replace('_', '-')}" in flags._option_string_actions
    assert "Width of the residual stream" in flags.format_help()
    assert len(all_fields()) == sum(len(dataclasses.fields(cls)) for cls in SECTIONS.values())


def test_only_given_flags_have_values():
    assert parse() == {}
    given = parse("--d-model", "64", "--norm-first", "--no-valid-bleu", "--adam-betas", "0.9,0.98")
    assert given == {"d_model": 64, "norm_first": True, "valid_bleu": False, "adam_betas": (0.9, 0.98)}


# Presets


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_valid_and_sets_its_complete_model_and_recipe(name):
    resolve(name, from_data=SIZE)
    given = read_yaml(preset_path(name))
    optional = {"vocab_size", "source_vocab_size", "embedding_dropout", "max_length", "pad_id"}
    optional |= {"output_bias", "first_position"}  # of imported models
    assert set(given["model"]) >= set(field_types(SECTIONS["model"])) - optional
    recipe = {"schedule", "warmup_updates", "adam_betas", "adam_eps", "label_smoothing", "precision", "clip_norm"}
    assert set(given["training"]) >= {*recipe, "max_update"}
    assert given["training"]["schedule"] == "noam" or "lr" in given["training"]
    assert {"beam", "length_penalty", "alpha"} <= set(given["decoding"])
    assert preset_path(name).read_text().startswith("# ")


def test_the_paper_presets_match_the_paper():
    base, big = (resolve(name, from_data=SIZE) for name in ("paper-base", "paper-big"))
    assert (base.model.d_model, base.model.heads, base.model.d_ff, base.model.dropout) == (512, 8, 2048, 0.1)
    assert (big.model.d_model, big.model.heads, big.model.d_ff, big.model.dropout) == (1024, 16, 4096, 0.3)
    for config in (base, big):
        assert (config.model.encoder_layers, config.model.decoder_layers, config.model.norm_first) == (6, 6, False)
        assert (config.training.schedule, config.training.warmup_updates) == ("noam", 4000)
        assert (config.training.adam_betas, config.training.adam_eps) == ((0.9, 0.98), 1e-9)
        assert (config.decoding.beam, config.decoding.alpha, config.decoding.max_len_b) == (4, 0.6, 50)
    assert (base.training.max_update, base.training.average_last) == (100_000, 5)
    assert (big.training.max_update, big.training.average_last) == (300_000, 20)


def test_no_length_penalty_overflows_float32():
    with pytest.raises(ValueError, match="alpha"):
        DecodingConfig(alpha=6.1)
    longest = DecodingConfig(alpha=6.0, max_len_a=1_000.0, max_len_b=1_000_000)
    penalty = length_penalty(longest.longest_output(longest.max_source_length) + 1, longest)
    assert torch.tensor(penalty, dtype=torch.float32).isfinite()
