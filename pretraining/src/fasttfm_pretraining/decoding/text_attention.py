"""Attention weights of an encoder-only model on a text."""

import torch

from fasttfm.errors import UserError
from fasttfm.translate.attention_plot import MOST_TOKENS, Attention
from fasttfm_pretraining.data.masking_vocabulary import masking_vocabulary
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.models.bert import Bert


def attention_of_text(body: Bert, tokenizer: TextTokenizer, text: str) -> Attention:
    """Attention weights of every layer and head on [CLS] text [SEP].

    Raises UserError for an empty text, or more tokens than a picture can show or the model has positions.
    """
    vocabulary, ids = masking_vocabulary(tokenizer), tokenizer.encode(text)
    if not ids or not text.strip():
        raise UserError("the text is empty: give some text to read")
    most = min(MOST_TOKENS, body.config.max_length - 2)
    if len(ids) > most:
        raise UserError(f"the text has {len(ids):,} tokens, at most {most} can be shown: give a shorter one")
    row = torch.tensor([[vocabulary.begin, *ids, vocabulary.end]], device="cpu")
    pieces = tokenizer.pieces()
    return Attention(
        weights={
            "encoder": [layer[0].float().cpu() for layer in body.attention_weights(row)],
            "cross": [],
            "decoder": [],
        },
        source=["[CLS]", *(pieces[number] for number in ids), "[SEP]"],
        read=[],
        written=[],
        translation="",
    )
