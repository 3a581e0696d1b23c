"""What the policy `auto` may have saved: anything else would break a step long after it was read."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from speculon.control.estimate import EDGES, POSITIONS

Ms = Annotated[float, Field(ge=-1e9, le=1e9)]
Weight = Annotated[float, Field(ge=0, le=1e9)]
Position = Annotated[int, Field(ge=0, le=POSITIONS)]
Grade = Annotated[int, Field(ge=0, le=len(EDGES) + 1)]
Nothing = Annotated[list[Ms], Field(max_length=0)]  # where nothing was timed yet


def a_share(said: tuple[float, ...]) -> tuple[float, ...]:
    *_, hits, tries = said
    if hits > tries * (1 + 1e-9):  # which rounding may do
        raise ValueError(f"{hits} hits of {tries} tries")
    return said


class Saved(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SavedAcceptance(Saved):
    seen: Annotated[int, Field(ge=0)]
    overall: Annotated[tuple[Weight, Weight], AfterValidator(a_share)]
    cells: list[Annotated[tuple[Position, Grade, Weight, Weight], AfterValidator(a_share)]]


class SavedMethod(Saved):
    all: SavedAcceptance
    kinds: dict[str, SavedAcceptance]
    chosen: dict[str, SavedAcceptance] = {}
    cost: Annotated[list[Ms], Field(min_length=4, max_length=4)] | Nothing


class SavedAuto(Saved):
    costs: Annotated[list[Ms], Field(min_length=4, max_length=4)] | Nothing
    methods: dict[str, SavedMethod]


def check(state: Any) -> dict[str, Any]:
    """The state itself. Raises `ValueError` for what no `Auto.state` has told."""
    return SavedAuto.model_validate(state).model_dump()
