"""Replaces functions of torch and other libraries by ours, and recognises their callers."""
