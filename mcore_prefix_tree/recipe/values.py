"""Types of a recipe's values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from mcore_prefix_tree.data.fields import check_names
from mcore_prefix_tree.inputs import MOST

# The type of an error about several keys together, of which none has a wrong value by itself.
AT_ODDS = "at_odds"

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def _no_boolean(value: object) -> object:
    """To Python a boolean is a number, to whoever writes ``train_iters: true`` it is a slip."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "input should be a number, not a boolean")
    return value


def _names(value: dict[str, str | None]) -> dict[str, str | None]:
    try:
        check_names(value)
    except ValueError as error:
        raise PydanticCustomError("field_names", "{error}", {"error": str(error)}) from None
    return value


Number = BeforeValidator(_no_boolean)
PositiveInt = Annotated[int, Field(gt=0, le=MOST), Number]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST), Number]
# torch's generators take 64 bits, and ranks add a little to theirs.
Seed = Annotated[int, Field(ge=0, lt=2**63), Number]
PositiveFloat = Annotated[float, Field(gt=0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0), Number]
Fields = Annotated[dict[str, str | None], AfterValidator(_names)]
Dtype = Literal["float64", "float32", "bfloat16"]
