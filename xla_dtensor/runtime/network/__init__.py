"""How processes find each other over the network, and whether they still reach each other."""
