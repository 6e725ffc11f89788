"""Views: what each reads from its base, and how a write to it goes back."""
