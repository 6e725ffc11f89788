"""From one layout to another, between the two views, to and from the host; collectives."""
