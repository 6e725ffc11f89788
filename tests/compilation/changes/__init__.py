"""What a user may change between two calls of a compiled step: a table of small programs.

A row is a generator. It makes its tensors in the `World` it is given, calls a compiled step,
changes something, calls again, and yields what a user would look at after each call. It runs as
plain torch on the CPU, and compiled on a mesh; `test_changes.py` compares. The change goes through
`World.change` (or is made where ``world.changes`` is true), so that the table can be checked too: a
row whose results are the same without its change would not notice a stale program.
"""

from tests.compilation.changes import (
    arguments,
    effects,
    functions,
    host,
    identity,
    kept,
    language,
    leaves,
    made_up,
    masks,
    modules,
    objects,
    on_the_host,
    optimizers,
    own_optimizers,
    reads,
    registered,
    settings,
    state_values,
    stepping,
    structure,
    subclasses,
    told,
    unnamed,
)
from tests.compilation.changes._refused import REFUSED
from tests.compilation.changes._table import TABLE, Row
from tests.compilation.changes._world import (
    EagerMesh,
    Mesh,
    Observation,
    ReplayMesh,
    World,
    assert_same,
    observe,
    same,
)

__all__ = [
    "REFUSED",
    "TABLE",
    "EagerMesh",
    "Mesh",
    "Observation",
    "ReplayMesh",
    "Row",
    "World",
    "arguments",
    "assert_same",
    "effects",
    "functions",
    "host",
    "identity",
    "kept",
    "language",
    "leaves",
    "made_up",
    "masks",
    "modules",
    "objects",
    "observe",
    "on_the_host",
    "optimizers",
    "own_optimizers",
    "reads",
    "registered",
    "same",
    "settings",
    "state_values",
    "stepping",
    "structure",
    "subclasses",
    "told",
    "unnamed",
]
