"""SiglipConfig: the shape of a vision tower in config.json; fields of preprocessor_config.json that models share."""

from dataclasses import dataclass
from pathlib import Path

from nanopage.checks.fields import Fields
from nanopage.files.model_files import exists, read_json, shown

FILES = ("processor_config.json", "preprocessor_config.json")
MAX_RESAMPLE = 5  # Pillow's filters


@dataclass(frozen=True)
class SiglipConfig:
    """image_size, patch_size: in pixels, of a side. The position embeddings are those of an image of `image_size`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    activation: str
    layer_norm_eps: float

    @property
    def side(self) -> int:
        """How many patches a side has."""
        return self.image_size // self.patch_size


def read_siglip(fields: Fields, patch_size: int, layers: int, heads: int) -> SiglipConfig:
    """Read vision_config. Args: the defaults of fields in which transformers' configurations differ.

    Raises: ValueError naming the field.
    """
    if fields.values.get("num_channels", 3) != 3:
        raise fields.unsupported("num_channels", shown(fields.values["num_channels"]), [3])
    config = SiglipConfig(
        hidden_size=fields.size("hidden_size", 1152),
        intermediate_size=fields.size("intermediate_size", 3072),
        num_layers=fields.size("num_hidden_layers", layers),
        num_heads=fields.size("num_attention_heads", heads),
        image_size=fields.size("image_size", 224),
        patch_size=fields.size("patch_size", patch_size),
        activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
        layer_norm_eps=fields.number("layer_norm_eps", 1e-6),
    )
    if config.hidden_size % config.num_heads:
        raise fields.error("hidden_size", f"must be a multiple of num_attention_heads={config.num_heads}")
    if not config.side:
        raise fields.error("patch_size", f"is more than image_size={config.image_size}")
    return config


def read_token(fields: Fields, name: str, default: int) -> int:
    """Read the token that stands for images. Raises: ValueError naming the field."""
    token = fields.values.get(name, default)
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < fields.size("vocab_size"):
        raise fields.error(name, "must be a token of the vocabulary")
    return token


@dataclass(frozen=True)
class Pixels:
    """How pixels, from 0 to 255, become numbers: (pixel * factor - mean) / std. resample: one of Pillow's filters."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int


def read_preprocessor(path: Path) -> tuple[Fields, Fields]:
    """What a model's directory says about images, and about prompts with images: the fields of the image processor, and
    of the processor. transformers 5 has the former as an object within the latter. Raises: ValueError naming the file.
    """
    both, one = (Fields(read_json(path / name) if exists(path / name) else {}, str(path / name)) for name in FILES)
    inner = both.object("image_processor")
    return (inner if inner.values else one), both


def read_pixels(fields: Fields, resample: int, mean: float = 0.5, std: float = 0.5) -> Pixels:
    """Read how pixels are prepared. Args: defaults. Raises: ValueError naming the field."""
    if fields.values.get("do_convert_rgb", True) is False:
        raise fields.unsupported("do_convert_rgb", "false", ["true"])
    means, stds = _three(fields, "image_mean", mean), _three(fields, "image_std", std)
    if not fields.flag("do_normalize", True):
        means, stds = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if not all(stds):
        raise fields.error("image_std", "must not have a zero")
    factor = fields.number("rescale_factor", 1 / 255) if fields.flag("do_rescale", True) else 1.0
    kind = fields.values.get("resample", resample)
    if not isinstance(kind, int) or isinstance(kind, bool) or not 0 <= kind <= MAX_RESAMPLE:
        raise fields.error("resample", f"must be an integer from 0 to {MAX_RESAMPLE}, got {shown(kind)}")
    return Pixels(factor, means, stds, kind)


def _three(fields: Fields, name: str, default: float) -> tuple[float, ...]:
    value = fields.values.get(name)
    values = [default] * 3 if value is None else value if isinstance(value, list) else [value] * 3
    plain = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(values) != 3 or len(plain) != 3 or not all(abs(each) <= 1e4 for each in plain):
        raise fields.error(name, f"must be a number, or three, got {shown(value)}")
    return tuple(map(float, plain))
