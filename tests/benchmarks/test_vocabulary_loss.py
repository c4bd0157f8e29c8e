"""The table of the loss over large vocabularies: both ways compute one loss, and the fused one holds less."""

import torch

from benchmarks import vocabulary_loss


def test_both_ways_compute_one_loss_and_the_fused_one_holds_no_logits_of_all_rows(monkeypatch, capsys):
    hidden, weight, target = torch.randn(5, 8), torch.randn(11, 8), torch.randint(11, (5,))
    torch.testing.assert_close(
        vocabulary_loss.fused(hidden, weight, target), vocabulary_loss.plain(hidden, weight, target)
    )
    rows, vocabulary = 2400, 4000  # the logits are more than a chunk of the fused way
    results = vocabulary_loss.measure(rows, 8, vocabulary, 1)
    assert results["plain"][1] > 4 * rows * vocabulary > results["fused"][1]
    monkeypatch.setattr(vocabulary_loss, "VOCABULARIES", (50, 70))
    assert vocabulary_loss.main(["--rows", "6", "--width", "8", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["V", "50", "70"]
    assert "fused, MiB" in lines[0]
