"""RopeConfig: rotary position embeddings, as data. reading/rope.py reads them."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters; `params` holds what is particular to `rope_type`, under config.json's names.

    partial: the share of each head's dimensions that is rotated, the first ones.
    temperature: (beta, length): q at a position is multiplied by 1 + beta * log(1 + position // length), as in Llama 4.
    """

    theta: float
    rope_type: str = "default"
    params: dict = field(default_factory=dict)
    partial: float = 1.0
    temperature: tuple[float, float] | None = None

    def num_rotated(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return int(head_dim * self.partial)

    def for_length(self, length: int) -> "RopeConfig":
        """The same for sequences of up to `length` tokens, on which the frequencies of longrope depend."""
        return replace(self, params=self.params | {"length": length}) if "length" in self.params else self


UNROTATED = RopeConfig(1.0, "none")  # of layers without rotary embeddings: their heads are rotated by nothing
