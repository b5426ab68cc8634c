"""Floor 1: who runs when, and in which blocks. Integers only: no tensors, no clock, no randomness.

May import `diptych.ground` alone. `EngineCore` (loop.py) is the door; engine and simulator drive the same object.
"""
