"""Models of Hugging Face with random weights, saved, and the comparison of their gradients with ours."""

import torch

BERT = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 20, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}  # fmt: skip
GPT = {
    "vocab_size": 37, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2, "initializer_range": 0.2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
SIZES = {
    "Bert": BERT,
    "Albert": BERT | {"embedding_size": 8},
    "Electra": BERT | {"embedding_size": 8},
    "Roberta": BERT | {"max_position_embeddings": 22, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "DistilBert": {
        "vocab_size": 50, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 20,
        "dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.2,
    },
    "GPT2": GPT,
    "OpenAIGPT": GPT,
    "Llama": {
        "vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 40, "max_position_embeddings": 64, "initializer_range": 0.3, "rms_norm_eps": 1e-5,
    },
}  # fmt: skip
"""Family -> fields of its configuration."""


def saved(name, folder, **changes):
    """A model of this class with random weights, biases and norms too; changes: of its configuration."""
    import transformers

    cls = getattr(transformers, name)
    sizes = next(sizes for family, sizes in SIZES.items() if name.startswith(family))
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**sizes, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return model.eval()


def saved_electra(folder, *, intermediate_size=12, **changes):
    """A discriminator, and a generator of this width that has its embeddings; changes: of both configurations."""
    small = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": intermediate_size}
    discriminator = saved("ElectraForPreTraining", folder / "d", **changes)
    generator = saved("ElectraForMaskedLM", folder / "g", **small, **changes)
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.generator_lm_head.weight = generator.electra.embeddings.word_embeddings.weight
    generator.save_pretrained(folder / "g")
    return discriminator, generator


def assert_same_gradients(ours, theirs, read, folder, *, rtol=1e-5, atol=1e-5, ignored="nothing"):
    """Under our names: by reading a model whose weights are their gradients. ignored: part of names."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(folder)
    expected = dict(read(folder).named_parameters())
    for name, parameter in ours.named_parameters():
        if ignored not in name:
            torch.testing.assert_close(parameter.grad, expected[name].detach(), rtol=rtol, atol=atol, msg=name)
