"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa: multilingual-e5, bge-m3 and its rerankers. Positions count from the id of
the padding token plus 1, as in fairseq."""

ARCHITECTURES = (
    "RobertaModel",
    "RobertaForSequenceClassification",
    "XLMRobertaModel",
    "XLMRobertaForSequenceClassification",
)
PREFIX = "roberta."
HEAD_PLACES = {"dense": "classifier.dense", "out": "classifier.out_proj"}
UNUSED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")


def first_position(pad_token_id: int) -> int:
    """The row of the first token in the position embeddings."""
    return pad_token_id + 1
