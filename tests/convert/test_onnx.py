"""The two ONNX graphs in onnxruntime: greedy search gives the same tokens as ours."""

import json

import numpy as np
import pytest
from model_dirs import LINES, LONGEST, write_model_dir

from fasttfm.cli.main import main
from fasttfm.data.tokenizer import EOS
from fasttfm.search import DecodingConfig, search_ids
from fasttfm.translate import Translator

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def greedy(folder, sources: list[list[int]]) -> list[list[int]]:
    """Translate a batch of sources by greedy search; returns ids."""
    search = json.loads((folder / "search.json").read_text())
    encoder, step = (onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("encoder", "step"))
    width = max(map(len, sources))
    source = np.array([[*row, *[search["pad"]] * (width - len(row))] for row in sources])
    mask = np.array([[True] * len(row) + [False] * (width - len(row)) for row in sources])
    keys, values = encoder.run(None, {"source": source, "source_mask": mask})
    memory = {"memory_keys": keys, "memory_values": values, "source_mask": mask}
    past = [np.zeros((search["layers"], len(sources), search["heads"], 0, search["head_size"]), np.float32)] * 2
    tokens = np.full(len(sources), search["start"])
    outputs: list[list[int]] = [[] for _ in sources]
    for written in range(LONGEST):
        logits, *past = step.run(None, {"tokens": tokens, "keys": past[0], "values": past[1], **memory})
        logits[:, search["never"] + [EOS] * (written < search["shortest"])] = -np.inf
        tokens = logits.argmax(1)
        for output, token in zip(outputs, tokens.tolist(), strict=True):
            output.append(token)
    return [output[: output.index(EOS)] if EOS in output else output for output in outputs]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"encoder_layers": 1, "positional_encoding": "learned", "max_length": 48, "min_len": 6},
        {"share_embeddings": "none", "output_bias": True, "first_position": 2, "activation": "silu",
         "norm_first": True, "final_norm": True},
    ],
)  # fmt: skip
def test_onnxruntime_gives_the_same_tokens(tmp_path, capsys, fields):
    model_dir = write_model_dir(tmp_path / "model", **fields)
    assert main(["export", str(model_dir), "--format", "onnx", "--out", str(tmp_path / "onnx")]) == 0
    assert "note: 3 texts are translated as onnxruntime translates them" in capsys.readouterr().out.splitlines()
    ours = Translator.from_directory(model_dir)
    sources = [[*ours.source_tokenizer.encode(line), EOS] for line in LINES]
    config = DecodingConfig(beam=1, min_len=fields.get("min_len", 1), max_len_a=0.0, max_len_b=LONGEST)
    expected = [best[0].tokens for best in search_ids(ours.model, sources, config)]
    assert greedy(tmp_path / "onnx", sources) == expected
    assert len({tuple(output) for output in expected}) > 3
    assert greedy(tmp_path / "onnx", sources[:1]) == expected[:1]
