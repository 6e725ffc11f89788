"""The models, layouts and twins of `layout_sweep.py`."""
