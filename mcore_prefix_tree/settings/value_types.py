"""Types of a recipe's values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from mcore_prefix_tree.data.fields import check_names
from mcore_prefix_tree.utils.inputs import HUB, MOST, local_path

# The type of an error whose sentence quotes the value.
NOT_LOCAL = "not_local"

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def _no_boolean(value: object) -> object:
    """Reject a boolean, which Python takes for a number: ``train_iters: true`` is a slip."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "input should be a number, not a boolean")
    return value


def _names(value: dict[str, str | None]) -> dict[str, str | None]:
    try:
        check_names(value)
    except ValueError as error:
        raise PydanticCustomError("field_names", "{error}", {"error": str(error)}) from None
    return value


def local(value: str | list[str] | None) -> str | list[str] | None:
    """Return :func:`local_path` of a path, or of each; raises the error that pydantic reports."""
    try:
        return [local_path(one) for one in value] if isinstance(value, list) else value and local_path(value)
    except ValueError as error:
        raise PydanticCustomError(NOT_LOCAL, "{error}", {"error": str(error)}) from None


def _data(value: str | list[str] | None) -> str | list[str] | None:
    if isinstance(value, list):
        return [one if one.startswith(HUB) else str(local(one)) for one in value]
    return value if value is None or value.startswith(HUB) else local(value)


Number = BeforeValidator(_no_boolean)
PositiveInt = Annotated[int, Field(gt=0, le=MOST), Number]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST), Number]
# torch's generators take 64 bits, and ranks add a little to theirs.
Seed = Annotated[int, Field(ge=0, lt=2**63), Number]
PositiveFloat = Annotated[float, Field(gt=0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0), Number]
Fields = Annotated[dict[str, str | None], AfterValidator(_names)]
# A path of this machine, or several; of data, also a name on the hub.
LocalPath = AfterValidator(local)
DataPath = AfterValidator(_data)
Dtype = Literal["float64", "float32", "bfloat16"]
