"""What a model makes of a text instead of more text: an embedding, or scores of classes.

`PoolingConfig` says how. pooling/files.py reads it from the files of an embedding model.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from nanopage.checks.options import Flag, check
from nanopage.files.model_files import shown

Runner = Literal["auto", "generate", "pooling"]
Conversion = Literal["auto", "none", "embed", "classify"]
POOLER_CONFIG = {"pooling_type": Literal["CLS", "LAST", "MEAN"], "normalize": Flag}
SIMILARITIES = ("cosine", "dot")
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}


@dataclass(frozen=True)
class PoolingConfig:
    """How a model makes a vector of a text.

    task: "embed" or "classify".
    pooling_type: which hidden states of the last layer make the vector: the first token's ("CLS"), the last token's
        ("LAST"), or the mean of all ("MEAN").
    normalize: whether embeddings are scaled to length 1, unless a request says otherwise.
    activation: of the scores of classes: "identity", "sigmoid" or "softmax".
    num_labels: how many classes there are; 0 for embeddings. A model with one class scores texts, or pairs of texts.
    similarity: of two embeddings: "cosine" or "dot".
    max_seq_length: most tokens of a text; None: as many as the model has positions for.
    prompts, default_prompt_name: texts that go before the texts to embed, by name.
    answers: two token ids, such as those of "no" and "yes". A text is scored by how much likelier the second one is to
        follow than the first.
    template: the texts before a pair, of a pair, and behind it; None: the two texts alone.
    """

    task: str = "embed"
    pooling_type: str = "LAST"
    normalize: bool = True
    activation: str = "identity"
    num_labels: int = 0
    similarity: str = "cosine"
    max_seq_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    answers: tuple[int, int] | None = None
    template: tuple[str, str, str] | None = None

    @property
    def scores(self) -> bool:
        """Whether the model itself scores a pair. If not, the embeddings of the two texts are compared."""
        return self.task == "classify" and self.num_labels == 1

    def prompt_for(self, name: str | None) -> str:
        """The text that goes before a text to embed. Raises: ValueError for a name that the model's files lack."""
        name = self.default_prompt_name if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise ValueError(f"prompt_name={name!r} is not one of the model's prompts: {known}")
        return self.prompts[name]


def check_pooler_config(pooler_config: dict | None) -> None:
    """Check the option of EngineConfig. Raises: ValueError, TypeError naming it."""
    for key, value in (pooler_config or {}).items():
        if key not in POOLER_CONFIG:
            raise ValueError(
                f"pooler_config has {shown(key)}, which is not supported; supported: {', '.join(POOLER_CONFIG)}"
            )
        check(f"pooler_config: {key}", value, POOLER_CONFIG[key])


def read_classifier(config: dict, source: str, num_labels: int) -> PoolingConfig:
    """How a decoder named ...ForSequenceClassification scores classes: by its last token.

    Args: config: config.json; source: its name. Raises: ValueError naming the field.
    """
    known = {
        "regression": "identity",
        "multi_label_classification": "sigmoid",
        "single_label_classification": "softmax",
    }
    problem = config.get("problem_type")
    activation = "softmax" if problem is None else known[choice(problem, known, f"{source}: problem_type")]
    if num_labels == 1 and activation == "softmax":
        activation = "sigmoid"
    section = config.get("sentence_transformers")
    section = section if isinstance(section, dict) else {}
    name = section.get("activation_fn", config.get("sbert_ce_default_activation_function"))
    if name is not None:
        activation = ACTIVATIONS[choice(name, ACTIVATIONS, f"{source}: the activation")]
    return PoolingConfig("classify", activation=activation, num_labels=num_labels)


def choice(value: Any, known: Iterable[str], place: str) -> str:
    """A value of a JSON file, of any type, that must be one of `known`. Raises: ValueError that begins with `place`."""
    names = tuple(known)
    if value not in names:
        raise ValueError(f"{place} {shown(value)} is not supported; supported: {', '.join(names)}")
    return value
