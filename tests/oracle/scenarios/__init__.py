"""One module per scenario: ``WORLD_SIZE``, and ``main(oracle)``, which uses torch's API alone."""
