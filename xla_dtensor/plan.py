"""The command ``python -m xla_dtensor.plan train.py --topology v5e:16x16``; importing it raises.

As an attribute ``xla_dtensor.plan`` is a function of `xla_dtensor.planning`, which has the rest.
"""

import sys

if __name__ != "__main__":
    raise ImportError(
        "xla_dtensor.plan is a function, and a command (python -m xla_dtensor.plan); what belongs "
        "to it is in xla_dtensor.planning"
    )

from xla_dtensor.planning.command import main

sys.exit(main(sys.argv[1:]))
