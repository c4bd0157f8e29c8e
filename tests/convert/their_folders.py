"""Small random models in the formats of Hugging Face's Marian and M2M-100, and a small tokenizer.json."""

import json
from pathlib import Path

import pytest
import torch
from model_dirs import tokenizer

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
