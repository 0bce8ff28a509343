"""Options checked against their annotations: a type, a `Literal`, or a range in `msgspec.Meta`.

The description in `Meta` is what error messages say of the range.
"""

import sys
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from nanopage.files.model_files import shown

MAX_INTEGER = 2**63 - 1


def integer(low: int, high: int = MAX_INTEGER) -> Meta:
    """A range of integers; without `high`, up to MAX_INTEGER."""
    words = f"of at least {low}" if high == MAX_INTEGER else f"from {low} to {high}"
    return Meta(ge=low, le=high, description=f"an integer {words}")


def number(low: float, high: float) -> Meta:
    """A range of numbers."""
    return Meta(ge=low, le=high, description=f"a number from {low} to {high}")


Count = Annotated[int, integer(1)]
Int64 = Annotated[int, Meta(ge=-MAX_INTEGER - 1, le=MAX_INTEGER, description="an integer of 64 bits")]
Flag = Annotated[bool, Meta(description="True or False")]
Gib = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a finite number above 0")]
SwapGib = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="a finite number of at least 0")]
Share = Annotated[float, Meta(gt=0, le=1, description="a number above 0 and at most 1")]
WORDS = {list[str]: "a list of strings", int: "an integer", dict: "a dict", str: "a string", type(None): "None"}


def check_fields(options: Any, but: tuple[str, ...] = ()) -> None:
    """Check the fields of a dataclass, except those named in `but`. Raises: as `check`."""
    try:
        msgspec.convert(vars(options), _struct_of(options.__class__, but))
    except msgspec.ValidationError:
        for field in fields(options):
            if field.name not in but:
                check(field.name, getattr(options, field.name), field.type)


@cache
def _struct_of(kind: type, but: tuple[str, ...]) -> type:
    """What msgspec checks in one call, which takes much less time than one call for each field."""
    checked = [(field.name, field.type) for field in fields(kind) if field.name not in but]
    return msgspec.defstruct(kind.__name__, checked)


def check(name: str, value: Any, kind: Any) -> None:
    """Raises: ValueError for a value that is not among the choices or out of range, TypeError for one of another type.
    The message names the option and what it may be."""
    try:
        msgspec.convert(float(value) if isinstance(value, float) else value, kind)  # msgspec does not know np.float64
    except msgspec.ValidationError as error:
        if choices := choices_of(kind):
            raise ValueError(f"{name}={shown(value)} is not one of {', '.join(choices)}") from None
        if isinstance(value, int) and value > MAX_INTEGER:
            raise ValueError(f"{name}={shown(value)} is too large") from None
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


def check_place(request: Any, name_field: str, path_field: str) -> None:
    """Check the name and the path of a frozen request. A Path becomes a string. Raises: TypeError, ValueError."""
    if isinstance(path := getattr(request, path_field), Path):
        object.__setattr__(request, path_field, str(path))
    for field in (name_field, path_field):
        if not isinstance(value := getattr(request, field), str):
            raise TypeError(f"{field} must be a string, not {shown(value)}")
        if not value:
            raise ValueError(f"{field} is empty")
