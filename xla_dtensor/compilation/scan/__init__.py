"""``xd.scan_layers``: equal layers as one loop of the program."""
