"""ALBERT (Lan et al. 2020): BERT with three changes, all of them fields of its configuration.

- Word embeddings of width E < d and a linear map to d: V E + E d parameters in the place of V d (embedding_size).
- Layers that have all, the attention or the feed-forward network in common (share).
- The order of two neighbouring segments is predicted (SOP) in the place of the next sentence, which the words of two
  texts give away; the head is the same two logits, the pairs are made by data.masked_rows.

So the body and the heads are those of models/bert.py.
"""

from fasttfm_pretraining.config.bert import AlbertConfig
from fasttfm_pretraining.models.bert import Bert, BertPretraining


class Albert(Bert):
    """The body: tokens to hidden states, and the pooled vector of a whole sequence."""

    config: AlbertConfig


class AlbertPretraining(BertPretraining):
    """ALBERT with the heads of masked language modelling and of sentence order; its body is an Albert."""

    config: AlbertConfig
    body_class = Albert
