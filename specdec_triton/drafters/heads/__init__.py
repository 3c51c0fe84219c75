"""Extra heads on the target that were trained to draft: EAGLE and Medusa, as they are published."""
