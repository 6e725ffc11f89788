"""The command ``python -m xla_dtensor.tune train.py --topology v5e:16x16``; importing it raises.

As an attribute ``xla_dtensor.tune`` is a function of `xla_dtensor.tuning`, which has the rest.
"""

import sys

if __name__ != "__main__":
    raise ImportError(
        "xla_dtensor.tune is a function, and a command (python -m xla_dtensor.tune); what belongs "
        "to it is in xla_dtensor.tuning"
    )

from xla_dtensor.tuning.command import main

sys.exit(main(sys.argv[1:]))
