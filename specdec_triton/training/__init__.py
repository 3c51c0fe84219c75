"""Train drafters on what the target itself writes."""
