"""Options checked against their annotations: a type, a `Literal`, or a range in `msgspec.Meta`.

The description in `Meta` is what error messages say of the range.
"""

import sys
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from nanopage.files.model_files import shown

Count = Annotated[int, Meta(ge=1, description="an integer of at least 1")]
Flag = Annotated[bool, Meta(description="True or False")]
Gib = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a finite number above 0")]
SwapGib = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="a finite number of at least 0")]
Share = Annotated[float, Meta(gt=0, le=1, description="a number above 0 and at most 1")]
WORDS = {int: "an integer", dict: "a dict", str: "a string", type(None): "None"}


def check(name: str, value: Any, kind: Any) -> None:
    """Raises: ValueError for a value that is not among the choices or out of range, TypeError for one of another type.
    The message names the option and what it may be."""
    try:
        msgspec.convert(float(value) if isinstance(value, float) else value, kind)  # msgspec does not know np.float64
    except msgspec.ValidationError as error:
        if choices := choices_of(kind):
            raise ValueError(f"{name}={shown(value)} is not one of {', '.join(choices)}") from None
        of_type = TypeError if ", got " in str(error) else ValueError
        raise of_type(f"{name} must be {_described(kind)}, not {shown(value)}") from None


def choices_of(kind: Any) -> tuple[str, ...]:
    """The names in a `Literal`, which may be part of a union; empty if there is none."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((get_args(part) for part in get_args(kind) if get_origin(part) is Literal), ())


def _described(kind: Any) -> str:
    if meta := getattr(kind, "__metadata__", None):
        return meta[0].description
    return WORDS.get(kind) or ", or ".join(map(_described, get_args(kind)))
