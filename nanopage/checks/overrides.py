"""The option `hf_overrides`: other values for fields of config.json. Those of the rope extend a context; the others
turn a decoder that answers yes or no into a reranker."""

from nanopage.checks.fields import Fields
from nanopage.checks.options import Flag, check
from nanopage.files.model_files import shown

ROPES = ("rope_parameters", "rope_scaling")  # the second is the older name
OF_CONTEXT = (*ROPES, "rope_theta", "max_position_embeddings")
OF_RERANKERS = ("architectures", "classifier_from_token", "is_original_qwen3_reranker")


def reranker_fields(overrides: dict | None) -> dict:
    """The fields that make a reranker."""
    return {name: value for name, value in (overrides or {}).items() if name in OF_RERANKERS}


def check_overrides(overrides: dict | None) -> None:
    """Raises: ValueError, TypeError naming the field. What a rope has is checked when the model is read."""
    fields = Fields(overrides or {}, "hf_overrides")
    for name in fields.values:
        if name not in OF_CONTEXT + OF_RERANKERS:
            known = ", ".join(OF_CONTEXT + OF_RERANKERS)
            raise ValueError(f"hf_overrides has {shown(name)}, which is not supported; supported: {known}")
    if "rope_theta" in fields.values:
        fields.number("rope_theta")
    if "max_position_embeddings" in fields.values:
        fields.size("max_position_embeddings")
    ropes = [name for name in ROPES if name in fields.values]
    if len(ropes) > 1:
        raise ValueError("hf_overrides: rope_parameters and rope_scaling are the same: give one")
    for name in ropes:
        if not fields.object(name).values:
            raise ValueError(f"hf_overrides: {name} is empty")
    if reranker := reranker_fields(overrides):
        _check_reranker(reranker)


def _check_reranker(fields: dict) -> None:
    names = fields.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and str(names[0]).endswith("ForSequenceClassification")):
        raise ValueError(f"hf_overrides: architectures must be one ...ForSequenceClassification, not {shown(names)}")
    tokens = fields.get("classifier_from_token")
    if not (isinstance(tokens, list) and len(tokens) == 2 and all(isinstance(token, str) for token in tokens)):
        raise ValueError(f"hf_overrides: classifier_from_token must be two tokens, not {shown(tokens)}")
    name = "is_original_qwen3_reranker"
    check(f"hf_overrides: {name}", fields.get(name, False), Flag)
