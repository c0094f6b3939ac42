"""ARIES: checkpoints, analysis, redo and undo; and a restore from the store."""
