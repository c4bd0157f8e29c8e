"""The benchmark of an epoch's padding, on a corpus that takes seconds."""

import json

import pytest

from benchmarks import padding_epoch
from benchmarks.measure import records
from fasttfm.data.demo import write_demo_corpus


def test_both_orders_take_the_same_tokens_and_stand_beside_the_documents(tmp_path, monkeypatch, capsys):
    write_demo_corpus(tmp_path / "text")
    small = {"d_model": 8, "heads": 2, "d_ff": 8, "encoder_layers": 1, "decoder_layers": 1}
    monkeypatch.setattr(padding_epoch, "preset_section", lambda *_: small)
    prepare = ("--vocab-size", "400", "--subset", "300")
    corpus = padding_epoch.end_to_end.Corpus(source="en", target="de", test="test", prepare=prepare, train=())
    monkeypatch.setitem(padding_epoch.end_to_end.CORPORA, padding_epoch.CORPUS, corpus)
    common = ["--text", str(tmp_path / "text"), "--max-tokens", "256", "--results", str(tmp_path)]
    common += ["--work", str(tmp_path / "work")]
    assert padding_epoch.main(common) == 0
    assert padding_epoch.main([*common, "--share", "0.25"]) == 0
    whole, part = (json.loads(line) for line in (tmp_path / "padding-epoch.jsonl").read_text().splitlines())
    records.validate(whole)
    assert (whole["share"], part["share"], whole["pairs"]) == (1.0, 0.25, 300)
    for record, share in ((whole, 1.0), (part, 0.25)):
        random, alike = record["measured"]
        assert random["order"] == "random order"
        assert random["padding"] > alike["padding"] + 0.1
        assert abs(random["target_tokens"] - alike["target_tokens"]) < 256
        assert alike["target_tokens"] == pytest.approx(share * whole["measured"][1]["target_tokens"], abs=256)
    assert "25% of an epoch of 300 pairs" in capsys.readouterr().out


def test_gains_are_told_beside_one_another():
    ours = {"random order": {"padding": 0.5, "seconds": 30.0}, "like length": {"padding": 0.04, "seconds": 15.0}}
    lines = padding_epoch.beside_published(ours).splitlines()
    assert lines[1].split() == ["random", "order", "50%", "30", "60%", "250"]
    assert lines[3].split() == ["times", "as", "fast", "2.00", "2.50"]


def test_a_share_outside_of_an_epoch_is_refused(tmp_path):
    for share in ("0", "1.5"):
        with pytest.raises(padding_epoch.UserError, match="--share"):
            padding_epoch.main(["--text", str(tmp_path), "--share", share])
