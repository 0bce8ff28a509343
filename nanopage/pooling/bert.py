"""BERT (Devlin et al. 2018): MiniLM, bge, e5, gte and most English encoders. Positions count from 0."""

ARCHITECTURES = ("BertModel", "BertForSequenceClassification")
PREFIX = "bert."  # of all weights but the classifier's, where there is one
HEAD_PLACES = {"dense": "pooler.dense", "out": "classifier"}
UNUSED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")  # without a classifier


def first_position(pad_token_id: int) -> int:
    """The row of the first token in the position embeddings."""
    return 0
