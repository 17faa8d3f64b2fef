"""What a draft is, before any array exists: its config, its layers, its kind."""
