"""What programs are drawn from, by family."""

import tests.fuzz.operations.devices
import tests.fuzz.operations.indexing
import tests.fuzz.operations.numbers
import tests.fuzz.operations.products
import tests.fuzz.operations.random_numbers
import tests.fuzz.operations.transforms
import tests.fuzz.operations.views
import tests.fuzz.operations.writes  # noqa: F401
