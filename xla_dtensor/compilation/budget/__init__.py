"""What a step's backward passes find saved, and what they compute again, within a memory budget."""
