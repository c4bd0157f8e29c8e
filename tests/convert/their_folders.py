"""Small random models in the formats of other tools, the commands that import them, and their weights to change."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq_models import write as write_fairseq
from model_dirs import tokenizer, write_model_dir
from safetensors.torch import load_file, save_file

from fasttfm.cli.main import main

Weights = dict[str, torch.Tensor]

M2M_SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "init_std": 0.3,
}  # fmt: skip


def write_opus(folder: Path) -> None:
    """Write a random OPUS-MT model: </s> is the first token, padding the last and also the start token."""
    import transformers

    pieces = tokenizer().pieces(range(4, len(tokenizer())))
    words = ["</s>", "<unk>", ">>deu<<", *pieces[::-1], "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(tokenizer().model)
    settings = {"source_lang": "en", "target_lang": "de", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(3)
    config = transformers.MarianConfig(
        **M2M_SIZES, vocab_size=len(words), activation_function="swish", scale_embedding=True, eos_token_id=0,
        pad_token_id=len(words) - 1, bos_token_id=0, decoder_start_token_id=len(words) - 1, forced_eos_token_id=None,
        num_beams=4,
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        model.final_logits_bias.normal_()
        model.model.shared.weight[-1] = 0.0
    model.save_pretrained(folder)


def write_m2m(folder: Path) -> None:
    """Write a random M2M-100 model."""
    import transformers

    words = ["<s>", "<pad>", "</s>", "<unk>", *tokenizer().pieces(range(4, len(tokenizer())))]
    (folder / "v.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "s.model").write_bytes(tokenizer().model)
    pieces = transformers.M2M100Tokenizer(str(folder / "v.json"), str(folder / "s.model"), src_lang="en", tgt_lang="de")
    pieces.save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.M2M100Config(vocab_size=len(words) + 108, **M2M_SIZES)
    model = transformers.M2M100ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.shared.weight[len(words) :] *= 0.1  # otherwise translations consist of language tokens
    model.save_pretrained(folder)


def tokenizer_json() -> str:
    """Return a tokenizer.json of fourteen characters and an end token."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {character: number for number, character in enumerate("abcdefghij klm")} | {"<|endoftext|>": 14}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    return made.to_str()


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", ".", "the", "cat", "##s", "sat"]
BERT = {
    "vocab_size": len(PIECES), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 20,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": len(PIECES), "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 20,
}  # fmt: skip
GPT = {"vocab_size": 15, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {
    "vocab_size": 15, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "max_position_embeddings": 16,
}  # fmt: skip
CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2LMHeadModel", GPT, "lm"),
    "llama": ("LlamaForCausalLM", LLAMA, "lm"),
    "bert": ("BertForPreTraining", BERT, "mlm"),
    "roberta": ("RobertaForMaskedLM", BERT | {"type_vocab_size": 1, "pad_token_id": 0}, "mlm"),
    "distilbert": ("DistilBertForMaskedLM", DISTILBERT, "mlm"),
    "squad": ("BertForQuestionAnswering", BERT, "finetune"),
}
"""Kind -> (class of transformers, sizes, command)."""


def write_folder(kind: str, folder: Path) -> None:
    """Write a valid directory."""
    if kind == "ctranslate2":
        pytest.importorskip("ctranslate2")
        model = write_model_dir(folder.parent / "model", trained=False, encoder_layers=1, decoder_layers=1)
        assert main(["export", str(model), "--format", kind, "--no-check", "--out", str(folder)]) == 0
        (folder / "sha256sums").unlink()  # other tools do not write it, and it would reveal every change
        return
    folder.mkdir()
    if kind in CLASSES:
        name, sizes, command = CLASSES[kind]
        import transformers

        cls = getattr(transformers, name)
        torch.manual_seed(0)
        cls(cls.config_class(**sizes)).save_pretrained(folder)
        if command == "lm":
            (folder / "tokenizer.json").write_text(tokenizer_json())
        else:
            (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    else:
        write = {"marian-hf": write_opus, "m2m100": write_m2m, "fairseq": partial(write_fairseq, learned=(8, 8))}[kind]
        write(folder)


def import_words(kind: str, folder: Path, out: Path) -> list[str]:
    """Return the command line that imports the directory."""
    if kind in CLASSES:
        return [CLASSES[kind][2], "import", str(folder), "--no-check", "--out", str(out)]
    given = folder / "checkpoint.pt" if kind == "fairseq" else folder
    words = ["import", str(given), "--format", kind, "--no-check", "--out", str(out)]
    if kind == "fairseq":
        files = (("--dict", "dict.src.txt"), ("--dict", "dict.tgt.txt"), ("--spm", "spm.model"))
        words += [word for flag, name in files for word in (flag, str(folder / name))]
    elif kind == "m2m100":
        words += ["--source-language", "en", "--target-language", "de"]
    return words


def stored(folder: Path) -> tuple[Weights, Callable[[Path, Weights], Any]]:
    """The weights in a directory, and the function that writes others into a copy of it."""
    if (folder / "model.safetensors").exists():
        given = load_file(folder / "model.safetensors")
        return given, lambda to, weights: save_file(weights, to / "model.safetensors", {"format": "pt"})
    loaded = torch.load(folder / "checkpoint.pt", weights_only=False)
    return loaded["model"], lambda to, weights: torch.save({**loaded, "model": weights}, to / "checkpoint.pt")
