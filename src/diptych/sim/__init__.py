"""Floor 2: the same scheduler on a virtual clock. Steps take as long as a model of cost predicts; nothing is computed.

May import ground, control, cost, metrics, workload and stepper; never compute or engine.
"""
