"""BERT (Devlin et al. 2018), such as MiniLM, bge, e5 and gte, and RoBERTa (Liu et al. 2019) with XLM-RoBERTa, such as
multilingual-e5, bge-m3 and its rerankers.

They are encoders, which pooling/encoder.py computes. RoBERTa's positions count from the id of the padding token plus 1,
as in fairseq.
"""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.files.model_files import shown
from nanopage.pooling.encoder import Encoder

ARCHITECTURES = (
    *("BertModel", "BertForSequenceClassification"),
    *("RobertaModel", "RobertaForSequenceClassification"),
    *("XLMRobertaModel", "XLMRobertaForSequenceClassification"),
)


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """Fields of ModelConfig that are particular to encoders."""
    values = fields.values
    if values.get("position_embedding_type", "absolute") != "absolute":
        raise fields.unsupported("position_embedding_type", shown(values["position_embedding_type"]), ["absolute"])
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name):
            raise fields.unsupported(name, "true")
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is not a multiple of num_attention_heads={num_heads}")
    fields.special_ids(fields.size("vocab_size"))
    pad_token_id, num_positions = values.get("pad_token_id"), fields.size("max_position_embeddings")
    first = 0 if _is_bert(architecture) else pad_token_id + 1 if isinstance(pad_token_id, int) else 2
    if num_positions <= first:
        raise fields.error("max_position_embeddings", f"must be more than {first}, got {num_positions}")
    return {
        "rms_norm_eps": fields.number("layer_norm_eps", 1e-12),
        "max_position_embeddings": num_positions - first,
        "first_position": first,
        "type_vocab_size": fields.size("type_vocab_size"),
        "activation": fields.activation("hidden_act", "gelu"),
    }


def make_model(config: ModelConfig) -> Encoder:
    return Encoder(config)


def rename(name: str, config: ModelConfig) -> str | None:
    """The name that a model has for a tensor of its checkpoint; None: it does not use the tensor.

    A checkpoint of a classifier has a prefix before all names but the classifier's.
    """
    head, prefix = {"classifier.dense": "dense", "classifier.out_proj": "out_proj"}, "roberta."
    if _is_bert(config.architecture):
        head, prefix = {"pooler.dense": "dense", "classifier": "out_proj"}, "bert."
    name = name.removeprefix(prefix)
    place, _, kind = name.rpartition(".")
    if place in head and config.pooling is not None and config.pooling.task == "classify":
        return f"score.{head[place]}.{kind}"
    return None if place == "pooler.dense" or name == "embeddings.position_ids" else name


def _is_bert(architecture: str) -> bool:
    return architecture.startswith("Bert")
